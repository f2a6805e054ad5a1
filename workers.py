"""Where tasks run: in this process, in processes of this machine, on Ray or on Dask, all behind one door.

::

    with opened("auto") as workers:  # or "4", "ray", "ray://head:10001", "dask://host:8786"
        for number, counts in workers.as_completed(count_part, [(part,) for part in parts]): ...

A task is a function of a module and its arguments. It draws random numbers from a seed among these, never from where
it runs, so that every way gives the same bytes. It has one thread. A task whose worker is lost runs again. Leaving the
block by an exception, Ctrl-C too, cancels what is left.
"""

import contextlib
import os
import pickle
import re
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from .errors import MoeplanError, RankError, UsageError, printable

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
Answer = tuple[bool, Any] | bytes  # whether a task ended well, then its result or its error; of others this in bytes
Row = tuple[Any, ...]  # the arguments of a task

TRIES = 3  # times that a task may lose its worker
HERE_S = 1.0  # of work that `auto` does in this process before it starts others: about what their start takes
ANSWER_S = 20  # that a scheduler of Dask has to answer
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
FEWER = "memory may have run out: try again, or with fewer --workers"
EXPECTED = "expected auto, a number of processes, ray, ray://HEAD:PORT or dask://HOST:PORT"
QUIET_RAY = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
_place = threading.local()  # `inside`: whether this thread runs a worker's task


class Backend(Protocol):
    """What runs tasks."""

    size: int  #: Tasks that it runs at once

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task; its answer as `answer` gives it."""
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

    def as_completed(self, task: Callable[..., T], rows: Iterable[Row]) -> Iterator[tuple[int, T]]:
        """The number of each row of arguments and its result, as they end; few wait at a time."""
        waiting = dict[Future[Answer], tuple[int, Pending[T]]]()
        with _cancelling(waiting):
            for number, row in enumerate(rows):
                pending = self.submit(task, *row)
                waiting[pending.future] = number, pending
                while len(waiting) >= self._most:
                    yield from _ended(waiting)
            while waiting:
                yield from _ended(waiting)

    def map(self, task: Callable[..., T], rows: Iterable[Row]) -> Iterator[T]:
        """The results of rows of arguments in their order; few wait at a time."""
        waiting = deque[Future[Answer]]()
        with _cancelling(waiting):
            for row in rows:
                waiting.append(self.submit(task, *row).future)
                if len(waiting) >= self._most:
                    yield Pending[T](waiting.popleft()).result()
            while waiting:
                yield Pending[T](waiting.popleft()).result()

    @property
    def _most(self) -> int:
        """Number of tasks that are under way or whose results wait, at most."""
        return 2 * self.backend.size - 1


@contextlib.contextmanager
def _cancelling(waiting: "Iterable[Future[Answer]]") -> Iterator[None]:
    """Cancel at the end what waits still, as after an error."""
    try:
        yield
    finally:
        for future in waiting:
            future.cancel()


def _ended(waiting: "dict[Future[Answer], tuple[int, Pending[T]]]") -> Iterator[tuple[int, T]]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for number, pending in sorted((waiting.pop(future) for future in done), key=lambda entry: entry[0]):
        yield number, pending.result()


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
        It is none of these, its package is not installed, or nothing answers there.
    """
    backend = backend_of(workers)
    try:
        yield Workers(backend)
    finally:
        backend.close()


@contextlib.contextmanager
def given(workers: Workers | None) -> Iterator[Workers]:
    """The workers, or where there are none threads of this process, for compiled code that lets others run."""
    if workers is not None or num_threads() == 1:
        yield workers or SERIAL
        return
    backend = Threads(num_threads())
    try:
        yield Workers(backend)
    finally:
        backend.close()


def backend_of(workers: str) -> Backend:
    """Open what `opened` says."""
    if workers == "auto":
        return Processes(num_threads(), here_s=HERE_S) if num_threads() > 1 else Serial()
    if re.fullmatch(r"[1-9][0-9]{0,3}", workers):
        return Processes(int(workers)) if int(workers) > 1 else Serial()
    scheme, _, address = workers.partition("://")
    if scheme not in CLUSTERS or not re.fullmatch(r"ray|\w+://[^\s/:]+:[0-9]+", workers):
        raise UsageError(f"--workers {workers}: {EXPECTED}")
    try:
        return CLUSTERS[scheme](address)
    except ImportError as error:
        raise UsageError(
            f"--workers {workers}: {error.name or scheme} is not installed; expected pip install 'moeplan[{scheme}]'"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:  # TimeoutError and ConnectionError are OSErrors
        reason = (printable(str(error).strip()) or type(error).__name__)[:160]
        raise UsageError(f"--workers {workers}: nothing answers there ({reason}); start it, or leave it out") from error


def num_threads() -> int:
    """Number of threads that a computation may have: one inside a worker, else one per core of this process."""
    return 1 if getattr(_place, "inside", False) else len(os.sched_getaffinity(0))


def answer(task: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Run a task as a worker does: what it returns, or its error."""
    outside, _place.inside = getattr(_place, "inside", False), True
    try:
        return True, task(*args)
    except Exception as error:  # noqa: BLE001  whatever it is, who asked tells it
        return False, error
    finally:
        _place.inside = outside


# Messages to other processes, which do with arrays what they like


@dataclass(frozen=True, slots=True)
class _Held:
    """Stands for a value that was broadcast."""

    number: int


def _message(task: Callable[..., Any], args: Row) -> tuple[bytes, list[int]]:
    """A task in bytes, and the numbers of the values that it holds."""
    return pickle.dumps((task, args)), [arg.number for arg in args if isinstance(arg, _Held)]


def reply(message: bytes, *values: bytes) -> bytes:
    """Run a task in a worker, with the values that it holds."""
    ended_well, value = answer(_run, message, *values)
    if not ended_well and not isinstance(value, MoeplanError):
        value.add_note(f"in a worker:\n{''.join(traceback.format_exception(value))}")
    try:
        return pickle.dumps((ended_well, value))
    except Exception as error:  # noqa: BLE001  whatever a result makes of being written
        said = f"{type(value).__name__} that cannot be sent ({error}); {value!r:.200}"
        return pickle.dumps((False, RuntimeError(said)))


def _run(message: bytes, *values: bytes) -> Any:
    (task, args), sent = pickle.loads(message), map(pickle.loads, values)  # noqa: S301  written by who gave the task
    return task(*(next(sent) if isinstance(arg, _Held) else arg for arg in args))


# This process


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
        """Nothing was started."""


SERIAL = Workers(Serial())


class Threads:
    """Threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._executor = ThreadPoolExecutor(size, "moeplan-threads")

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task."""
        return self._executor.submit(answer, task, *args)

    def broadcast(self, value: Any) -> Any:
        """The value."""
        return value

    def close(self) -> None:
        """Cancel what has not begun."""
        self._executor.shutdown(cancel_futures=True)


# Processes of this machine


class Processes:
    """Processes of this machine, each with a thread here that feeds it.

    Parameters
    ----------
    here_s
        Seconds of work that are done in this process before any is started.
    """

    def __init__(self, size: int, *, here_s: float = 0.0) -> None:
        self.size, self._left_s = size, here_s
        self._values = list[bytes]()  # that were broadcast
        self._lock, self._closed, self._started = threading.Lock(), False, list[_Process]()
        self._own = threading.local()  # `process`: that of a feeder
        self._feeders = ThreadPoolExecutor(size, "moeplan-workers", _leave_interrupts_to_parent)

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task, or run it here."""
        message, numbers = _message(task, args)
        if self._left_s <= 0:
            return self._feeders.submit(self._answered, message, numbers)
        future, started = Future[Answer](), time.perf_counter()
        future.set_result(reply(message, *(self._values[number] for number in numbers)))
        self._left_s -= time.perf_counter() - started
        return future

    def broadcast(self, value: Any) -> Any:
        """Keep a value for every process that gets a task with it."""
        self._values.append(pickle.dumps(value))
        return _Held(len(self._values) - 1)

    def close(self) -> None:
        """Kill the processes."""
        with self._lock:
            self._closed = True
            for process in self._started:
                process.kill()
        self._feeders.shutdown(cancel_futures=True)
        for process in self._started:
            process.end()

    def _answered(self, message: bytes, numbers: list[int]) -> bytes:
        """The answer of a process, or of the next one where it dies; RankError where all of them do."""
        for _ in range(TRIES):
            process = self._own.process = getattr(self._own, "process", None) or self._new()
            try:
                return process.ask(message, numbers, self._values)
            except (EOFError, OSError):
                self._own.process = None
                process.kill()
                if self._closed:
                    raise CancelledError from None
        raise RankError(f"a worker process died {TRIES} times at one task ({process.end()}); {FEWER}")

    def _new(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise CancelledError
            self._started.append(process := _Process())
            return process


class _Process:
    """A process that answers one task at a time, and ends with this one."""

    def __init__(self) -> None:
        from multiprocessing import get_context

        spawn = get_context("spawn")  # a fork would copy locks of other threads
        self._pipe, theirs = spawn.Pipe()
        self._process, self._known = spawn.Process(target=_serve, args=(theirs,), daemon=True), set[int]()
        self._process.start()
        theirs.close()  # its death now ends the pipe

    def ask(self, message: bytes, numbers: list[int], values: list[bytes]) -> bytes:
        """The answer to a task; EOFError or OSError where the process dies."""
        missing = {*numbers} - self._known
        self._pipe.send((message, numbers, {number: values[number] for number in missing}))
        self._known |= missing
        return self._pipe.recv_bytes()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def end(self) -> str:
        """How it ended."""
        self._process.join(1)
        code = self._process.exitcode
        return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


def _leave_interrupts_to_parent() -> None:
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
            message, numbers, new = pipe.recv()
            values.update(new)
            pipe.send_bytes(reply(message, *(values[number] for number in numbers)))
        except (EOFError, OSError):  # nobody asks any more
            return


def _end_with_parent() -> None:
    """End this process, whatever it computes, once its parent has."""
    from multiprocessing import connection, parent_process

    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


# Clusters


class Ray:
    """A cluster of Ray: the one at an address, else the one that runs here, else a new one on this machine."""

    def __init__(self, address: str) -> None:
        self._ray = ray = import_module("ray")
        self._joined_before = ray.is_initialized()
        if address:
            ray.init(f"ray://{address}", logging_level="ERROR")
        elif not self._joined_before:
            self._start_or_join()
        self._values, self._reply = list[Any](), ray.remote(reply).options(num_cpus=1, max_retries=TRIES - 1)
        self._begun = dict[Future[Answer], Any]()
        self.size = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task."""
        message, numbers = _message(task, args)
        reference = self._reply.remote(message, *(self._values[number] for number in numbers))
        future: Future[Answer] = reference.future()
        self._begun[future] = reference
        future.add_done_callback(self._begun.pop)
        return future

    def broadcast(self, value: Any) -> Any:
        """Put a value into the object store."""
        self._values.append(self._ray.put(pickle.dumps(value)))
        return _Held(len(self._values) - 1)

    def close(self) -> None:
        """Cancel what is left, and leave the cluster unless it was joined before."""
        for reference in [*self._begun.values()]:
            self._ray.cancel(reference, force=True)
        if not self._joined_before:
            self._ray.shutdown()

    def _start_or_join(self) -> None:
        try:
            self._ray.init("auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError:  # none runs
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to the network
            self._ray.init(**QUIET_RAY)


class Dask:
    """The scheduler of Dask at an address."""

    def __init__(self, address: str) -> None:
        self._client = import_module("distributed").Client(f"tcp://{address}", timeout=ANSWER_S, set_as_default=False)
        self._executor, self._values = self._client.get_executor(pure=False), list[Any]()
        self.size = max(1, sum(self._client.nthreads().values()))

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Answer]":
        """Begin a task."""
        message, numbers = _message(task, args)
        future: Future[Answer] = self._executor.submit(reply, message, *(self._values[number] for number in numbers))
        return future

    def broadcast(self, value: Any) -> Any:
        """Send a value to all workers."""
        self._values.append(self._client.scatter(pickle.dumps(value), broadcast=True))
        return _Held(len(self._values) - 1)

    def close(self) -> None:
        """Cancel what is left, and leave the scheduler."""
        self._executor.shutdown(wait=False)
        self._client.close()


CLUSTERS: dict[str, Callable[[str], Backend]] = {"ray": Ray, "dask": Dask}
