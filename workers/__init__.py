"""Workers that run tasks: this process, processes of this machine, Ray or Dask, all behind one door.

::

    with opened("auto") as workers:  # or "4", "ray", "ray://head:10001", "dask://host:8786"
        for number, counts in workers.as_completed(count_part, [(part,) for part in parts]): ...

A task is a function of a module and its arguments. It draws random numbers from a seed among these, never from where
it runs, so that every way gives the same bytes. It has one thread. A task whose worker is lost runs again. Leaving the
block by an exception, Ctrl-C too, cancels what is left.
"""

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..errors import MoeplanError, RankError, UsageError, printable
from .clusters import CLUSTERS
from .here import Serial, Threads
from .processes import Processes
from .tasks import FEWER, Answer, num_threads

__all__ = ["SERIAL", "Backend", "Pending", "Workers", "backend_of", "given", "num_threads", "opened"]

T = TypeVar("T")
HERE_S = 1.0  # of work that `auto` does in this process before it starts others: about what their start takes
EXPECTED = "expected auto, a number of processes, ray, ray://HEAD:PORT or dask://HOST:PORT"


class Backend(Protocol):
    """Runner of tasks."""

    size: int  #: Tasks that it runs at once

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task; its answer as `tasks.answer` gives it."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Send a value to every worker once; what stands for it among the arguments of tasks."""
        ...

    def close(self) -> None:
        """Cancel what has not ended, and end what was started."""
        ...


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A task that was submitted."""

    future: "Future[Answer]"

    def result(self) -> T:
        """Wait for the result; raises what the task raised, and RankError where its workers were lost."""
        try:
            said = self.future.result()
        except (MoeplanError, CancelledError):
            raise
        except Exception as error:
            raise RankError(f"a task lost its workers ({type(error).__name__}); {FEWER}") from error
        ended_well, value = pickle.loads(said) if isinstance(said, bytes) else said  # noqa: S301  written by a worker
        if not ended_well:
            raise value
        result: T = value
        return result


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers that are open; see `opened`."""

    backend: Backend

    @property
    def size(self) -> int:
        """Number of tasks that run at once."""
        return self.backend.size

    def submit(self, task: Callable[..., T], *args: Any) -> Pending[T]:
        """Begin a task."""
        return Pending(self.backend.submit(task, *args))

    def broadcast(self, value: T) -> T:
        """Send a value to every worker once; to be used as an argument of tasks, where it is the value again."""
        held: T = self.backend.broadcast(value)
        return held

    def map(self, task: Callable[..., T], rows: Iterable[tuple[Any, ...]]) -> Iterator[T]:
        """The results of rows of arguments in their order; few wait at a time."""
        return (result for _, result in self._run(task, rows, in_order=True))

    def as_completed(self, task: Callable[..., T], rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, T]]:
        """The number of each row of arguments and its result, as they end; few wait at a time."""
        return self._run(task, rows, in_order=False)

    def _run(
        self, task: Callable[..., T], rows: Iterable[tuple[Any, ...]], *, in_order: bool
    ) -> Iterator[tuple[int, T]]:
        """Results by number, with two tasks per worker under way at most; what is left at an error is cancelled."""
        waiting = dict[Future[Answer], int]()

        def ended() -> Iterator[tuple[int, T]]:
            done = [*waiting][:1] if in_order else wait(waiting, return_when=FIRST_COMPLETED).done
            for future in sorted(done, key=waiting.__getitem__):
                yield waiting.pop(future), Pending[T](future).result()

        try:
            for number, row in enumerate(rows):
                waiting[self.submit(task, *row).future] = number
                if len(waiting) >= 2 * self.size - 1:
                    yield from ended()
            while waiting:
                yield from ended()
        finally:
            for future in waiting:
                future.cancel()


SERIAL = Workers(Serial())


@contextlib.contextmanager
def opened(workers: str = "auto") -> Iterator[Workers]:
    """Open workers and close them at the end of the block.

    Parameters
    ----------
    workers
        "auto": this process, and processes of this machine once a second of work was done; inside a worker this process
        alone. A number: so many processes. "ray": the cluster of Ray that runs here, else a new one on this machine;
        "ray://head:port": that one. "dask://host:port": the scheduler there.

    Raises
    ------
    UsageError
        `workers` is none of these, its package is not installed, or nothing answers there.
    """
    with contextlib.closing(backend_of(workers)) as backend:
        yield Workers(backend)


@contextlib.contextmanager
def given(workers: Workers | None) -> Iterator[Workers]:
    """The workers, or where there are none threads of this process, for compiled code that lets others run."""
    if workers is not None or num_threads() == 1:
        yield workers or SERIAL
        return
    with contextlib.closing(Threads(num_threads())) as backend:
        yield Workers(backend)


def backend_of(workers: str) -> Backend:
    """Open what `opened` says."""
    if workers == "auto":
        return Processes(num_threads(), here_s=HERE_S) if num_threads() > 1 else Serial()
    if re.fullmatch(r"[1-9][0-9]{0,3}", workers):
        return Processes(int(workers)) if int(workers) > 1 else Serial()
    scheme, _, address = workers.partition("://")
    port = re.fullmatch(r"[^\s/:]+:([0-9]{1,5})", address)
    known = int(port[1]) < 2**16 if port else workers == "ray"
    if scheme not in CLUSTERS or not known:
        raise UsageError(f"--workers {workers}: {EXPECTED}")
    try:
        return CLUSTERS[scheme](address)
    except ImportError as error:
        raise UsageError(
            f"--workers {workers}: {error.name or scheme} is not installed; expected pip install 'moeplan[{scheme}]'"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # TimeoutError and ConnectionError are OSErrors
        reason = (printable(" ".join(str(error).split())) or type(error).__name__)[:160]
        if isinstance(error, OSError):
            said = f"nothing answers there ({reason}); start it, or leave it out"
        else:
            said = f"cannot be joined ({reason}); expected the same Python and {scheme} here as there"
        raise UsageError(f"--workers {workers}: {said}") from error
