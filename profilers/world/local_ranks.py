"""Ranks as local processes: started together, watched, and ended together whatever happens to one of them.

They are forks of one process, their nursery, which imports what they need once: eight ranks on two cores would do it
four times in turn. What is imported there must neither touch a GPU nor compute with several threads.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

from ...errors import RankError
from .failures import as_own_failure, in_words, lost_peers

PRELOADED = "torch.distributed"
START_S = 120.0  # the least silence allowed until every rank is up: importing takes its time
EXIT_S = 5.0
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
Progress = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Channel:
    """A rank's line to the process that started it."""

    pipe: Connection

    def greet(self) -> None:
        """Tell the parent that this rank is up: its silence counts from here."""
        self._send("joined", None)

    def report(self, value: Any) -> None:
        """Tell the parent `value`; it also counts as a sign of life."""
        self._send("progress", value)

    def deliver(self, result: Any) -> None:
        """Hand in the rank's result and stay: a rank that leaves early breaks collectives. The parent ends it."""
        self._send("result", result)
        self.pipe.poll(None)

    def fail(self, error: Exception) -> None:
        """Tell the parent why this rank ends."""
        if lost_peers(error):
            self._send("lost", str(error).splitlines()[0])
        else:
            failure = as_own_failure(error)
            self._send("failure", (type(failure), str(failure)))

    def _send(self, kind: str, content: Any) -> None:
        # Plain pickle: the one of multiprocessing passes tensors by file descriptors that end with the sender.
        self.pipe.send_bytes(pickle.dumps((kind, content)))


@dataclass(frozen=True, slots=True)
class _Nursery:
    """The parent's ends: of the ranks' pipes, and of the one that tells rank and exit code of those that died."""

    process: BaseProcess
    deaths: Connection
    pipes: list[Connection]

    def exit_code(self, rank: int) -> int | None:
        """Exit code of a rank whose pipe has ended, or of the nursery that ended with it. None where it is unknown."""
        try:
            while self.deaths.poll(EXIT_S):
                dead, code = pickle.loads(self.deaths.recv_bytes())  # noqa: S301  written by our own child
                if dead == rank:
                    return int(code)
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_S)
            return self.process.exitcode or None
        return None


def run_ranks(
    num_ranks: int, entry: Callable[[int, Channel], None], *, timeout_s: float, on_progress: Progress | None = None
) -> list[Any]:
    """Results that `num_ranks` local processes deliver, by rank. All are ended (killed) before this returns or raises.

    Parameters
    ----------
    entry
        Called as `entry(rank, channel)` in each process; picklable; calls `channel.greet()` when it is up and
        `channel.deliver(result)` at its end.
    timeout_s
        The longest silence once all ranks have greeted: seconds without a report or a result from any of them.
    on_progress
        Receives what the ranks report, in order of arrival.

    Raises
    ------
    RankError
        A rank died, hung or failed, by its number.
    MoeplanError
        The error of that class which a rank raised, its number in front.
    """
    with _started(num_ranks, pickle.dumps(entry)) as nursery:
        return _collect(nursery, timeout_s, on_progress)


@contextlib.contextmanager
def _started(num_ranks: int, entry: bytes) -> Iterator[_Nursery]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(num_ranks + 1)), strict=True)
    process = context.Process(target=_nurse, args=(entry, theirs[0], theirs[1:]))
    try:
        _start(process)
        for pipe in theirs:
            pipe.close()  # the child's death now ends the pipe
        yield _Nursery(process, ours[0], list(ours[1:]))
    finally:
        ours[0].close()  # upon which the nursery ends its ranks, and itself
        if process.pid is not None:
            try:
                process.join(EXIT_S)
            finally:
                process.kill()  # it may import for ever; its ranks end with it
                process.join()
        for pipe in (*ours[1:], *theirs):
            pipe.close()


def _start(process: BaseProcess) -> None:
    resource_tracker.ensure_running()  # it would lift the mask below if it started inside
    with interrupts_blocked():
        process.start()


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, which reaches a whole process group: children started here leave the answer to their parent."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _nurse(entry: bytes, deaths: Connection, pipes: Sequence[Connection]) -> None:
    """Start the ranks, tell of those that die, and kill the others once nobody listens."""
    with contextlib.suppress(BaseException):  # a rank that misses something tells so itself
        importlib.import_module(PRELOADED)
        pickle.loads(entry)  # noqa: S301  written by our own parent
    if deaths.poll():  # nobody listens any more
        return
    context = multiprocessing.get_context("fork")
    ranks: list[ForkProcess] = []
    with contextlib.suppress(OSError):  # nobody listens, or there is no room for another process
        for index, pipe in enumerate(pipes):
            others = deaths, *pipes[index + 1 :]
            rank = context.Process(target=_main, args=(index, entry, pipe, others), daemon=True)
            rank.start()
            ranks.append(rank)
            pipe.close()
        _tell_deaths(ranks, deaths)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()


def _tell_deaths(ranks: Sequence[BaseProcess], deaths: Connection) -> None:
    living = {rank.sentinel: index for index, rank in enumerate(ranks)}
    while deaths not in (ready := connection.wait([deaths, *living])):  # the parent says nothing, but ends
        for sentinel in ready:
            index = living.pop(sentinel)  # type: ignore[arg-type]
            ranks[index].join()
            deaths.send_bytes(pickle.dumps((index, ranks[index].exitcode)))


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory, as devices' allocators do: else each large tensor is faulted in page by page.

    How often that happens depends on what else a process has allocated; it made equal calls take up to twice as long.
    """
    with contextlib.suppress(AttributeError, OSError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def _main(index: int, entry: bytes, pipe: Connection, others: Sequence[Connection]) -> None:
    for other in others:  # which the fork has copies of
        other.close()
    _keep_freed_memory()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    channel = Channel(pipe)
    try:
        pickle.loads(entry)(index, channel)  # noqa: S301  written by our own parent
    except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
        channel.fail(error)


def _end_with_parent(pipe: Connection) -> None:
    """End this rank with the nursery, or once nobody listens on its pipe, on which nothing is ever sent to it."""
    nursery = multiprocessing.parent_process()
    if nursery is not None:
        connection.wait([nursery.sentinel, pipe])
        os._exit(1)


def _collect(nursery: _Nursery, timeout_s: float, on_progress: Progress | None) -> list[Any]:
    filed: dict[str, dict[int, Any]] = {"result": {}, "lost": {}}
    silent = {pipe: rank for rank, pipe in enumerate(nursery.pipes)}
    joined = 0
    allowed_s = max(timeout_s, START_S)
    deadline = time.monotonic() + allowed_s
    while silent:
        ready = connection.wait(list(silent), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"{in_words(sorted(silent.values()))} did not answer within {allowed_s:g} s")
        for pipe in ready:
            rank = silent[pipe]  # type: ignore[index]
            kind, content = _receive(nursery, rank)
            if kind == "failure":
                raise content[0](f"rank {rank}: {content[1]}")
            joined += kind == "joined"
            allowed_s = timeout_s if joined == len(nursery.pipes) else allowed_s
            if kind != "lost":
                deadline = time.monotonic() + allowed_s
            if kind == "progress" and on_progress is not None:
                on_progress(content)
            if kind in filed:
                filed[kind][rank] = content
                del silent[pipe]  # type: ignore[arg-type]
    if lost := filed["lost"]:
        raise RankError(f"rank {min(lost)} lost the others, which are alive: {lost[min(lost)]}")
    return [result for _, result in sorted(filed["result"].items())]


def _receive(nursery: _Nursery, rank: int) -> tuple[str, Any]:
    try:
        written = nursery.pipes[rank].recv_bytes()
    except (EOFError, OSError):
        raise RankError(_died(rank, nursery.exit_code(rank))) from None
    message: tuple[str, Any] = pickle.loads(written)  # noqa: S301  written by our own child
    return message


def _died(index: int, exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"rank {index} died (exit code {exit_code}); expected a result"
    name = signal.Signals(-exit_code).name
    advice = "memory may have run out, try fewer ranks" if name == "SIGKILL" else "expected a result"
    return f"rank {index} died ({name}); {advice}"
