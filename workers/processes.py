"""Processes of this machine, each with a thread here that feeds it."""

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from ..errors import RankError
from .process import Process, leave_interrupts_to_parent
from .tasks import FEWER, TRIES, Answer, Held, message, reply


class Processes:
    """Processes of this machine.

    Parameters
    ----------
    here_s
        Seconds of work that are done in this process before any is started.
    """

    def __init__(self, size: int, *, here_s: float = 0.0) -> None:
        self.size, self._left_s = size, here_s
        self._lock, self._closed, self._started = threading.Lock(), False, list[Process]()
        self._own = threading.local()  # `process`: that of a feeder
        self._feeders = ThreadPoolExecutor(size, "moeplan-workers", leave_interrupts_to_parent)

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task, or run it here."""
        sent = message(task, args)
        if self._left_s <= 0:
            return self._feeders.submit(self._answered, sent)
        future, started = Future[Answer](), time.perf_counter()
        future.set_result(reply(*sent))
        self._left_s -= time.perf_counter() - started
        return future

    def broadcast(self, value: Any) -> Any:
        """Keep a value for every process that gets a task with it."""
        return Held(pickle.dumps(value))

    def close(self) -> None:
        """Kill the processes."""
        with self._lock:
            self._closed = True
            for process in self._started:
                process.kill()
        self._feeders.shutdown(cancel_futures=True)
        for process in self._started:
            process.end()

    def _answered(self, sent: tuple[bytes, ...]) -> bytes:
        """The answer of a process, or of the next one where it dies; RankError where all of them do."""
        for _ in range(TRIES):
            process = self._own.process = getattr(self._own, "process", None) or self._new()
            try:
                return process.ask(*sent)
            except (EOFError, OSError):
                self._own.process = None
                process.kill()
                if self._closed:
                    raise CancelledError from None
        raise RankError(f"a worker process died {TRIES} times at one task ({process.end()}); {FEWER}")

    def _new(self) -> Process:
        with self._lock:
            if self._closed:
                raise CancelledError
            self._started.append(process := Process())
            return process
