"""Tasks that workers of all kinds run in tests."""

import os
import signal
import time
from pathlib import Path

from moeplan.errors import InputError
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.statistics import Statistics, describe
from moeplan.traces.writer import TraceWriter
from moeplan.workers import SERIAL, Workers, backend_of, num_threads
from tests.traces.builders import META, make_batch


def doubled(number: int) -> int:
    """Twice the number, the later the smaller it is."""
    time.sleep(0.02 / number)
    return 2 * number


def number_in(_: int, text: bytes) -> int:
    """The number in a line, for `parsed_lines`."""
    return int(text)


def refusing(number: int) -> int:
    raise InputError(f"part {number}: damaged")


def broken(number: int) -> int:
    raise ZeroDivisionError(f"bug {number}")


def place() -> tuple[str, int, str | None]:
    """What `auto` is here, and how many threads there may be."""
    return type(backend_of("auto")).__name__, num_threads(), os.environ.get("OMP_NUM_THREADS")


def length(value: bytes, number: int) -> int:
    return len(value) + number


def lasting(number: int, folder: str) -> int:
    """Say where the task runs; all but the first last long."""
    (Path(folder) / f"{number}.writing").write_text(str(os.getpid()))
    (Path(folder) / f"{number}.writing").rename(Path(folder) / str(number))
    time.sleep(60 * (number > 0))
    return number


def dying_once(number: int, folder: str) -> int:
    """Kill the worker when the task runs first."""
    mark = Path(folder) / str(number)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def dying(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unsendable() -> object:
    return lambda: SERIAL


def written(folder: Path) -> Trace:
    """A trace of twelve parts."""
    with TraceWriter(folder, META) as writer:
        for seed in range(12):
            writer.append(make_batch(300 + seed, seed=seed, known=("step", "sample", "source_rank")))
            writer.flush()
    return open_trace(folder)


def described(trace: Trace, workers: Workers) -> Statistics:
    return describe(trace, coactivation=True, workers=workers)
