"""Tasks in the process itself, one after another or on its threads."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .tasks import Answer, answer


class Serial:
    """The process itself: one task after another, each when it is submitted."""

    size = 1

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Run a task."""
        future = Future[Answer]()
        try:
            future.set_result((True, task(*args)))
        except Exception as error:  # noqa: BLE001  raised where the result is asked for
            future.set_result((False, error))
        return future

    def broadcast(self, value: Any) -> Any:
        """The value."""
        return value

    def close(self) -> None:
        """Do nothing: no process was started."""


class Threads(Serial):
    """Threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._executor = ThreadPoolExecutor(size, "moeplan-threads")

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task."""
        return self._executor.submit(answer, task, *args)

    def close(self) -> None:
        """Cancel what has not begun."""
        self._executor.shutdown(cancel_futures=True)
