"""A process that answers one task at a time and ends with its parent: the parent's end, and its own."""

import os
import signal
import threading
from typing import TYPE_CHECKING

from .tasks import reply

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class Process:
    """The parent's end."""

    def __init__(self) -> None:
        from multiprocessing import get_context

        spawn = get_context("spawn")  # a fork would copy locks of other threads
        self._pipe, theirs = spawn.Pipe()
        self._process, self._known = spawn.Process(target=_serve, args=(theirs,), daemon=True), dict[int, bytes]()
        self._process.start()
        theirs.close()  # its death now ends the pipe

    def ask(self, message: bytes, *values: bytes) -> bytes:
        """The answer to a task, with values that are sent once; EOFError or OSError where the process dies."""
        new = {id(value): value for value in values if id(value) not in self._known}
        self._pipe.send((message, [*map(id, values)], new))
        self._known |= new  # which keeps them, so that no other has their id
        return self._pipe.recv_bytes()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def end(self) -> str:
        """Exit code or signal that ended the process."""
        self._process.join(1)
        code = self._process.exitcode
        return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


def leave_interrupts_to_parent() -> None:
    """Block Ctrl-C, which reaches a whole process group, in what this thread starts: the parent answers it."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would lift the mask if it started later
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _serve(pipe: "Connection") -> None:
    """Answer tasks until the parent ends."""
    os.environ.update(ONE_THREAD)  # before numpy is loaded
    threading.Thread(target=_end_with_parent, daemon=True).start()
    values = dict[int, bytes]()
    while True:
        try:
            message, keys, new = pipe.recv()
            values |= new
            pipe.send_bytes(reply(message, *(values[key] for key in keys)))
        except (EOFError, OSError):  # nobody asks any more
            return


def _end_with_parent() -> None:
    """End this process, whatever it computes, once its parent has."""
    from multiprocessing import connection, parent_process

    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
