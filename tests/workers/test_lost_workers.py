"""Processes that die, and those that end with their parent or at Ctrl-C.

MOEPLAN_KILL_RUNS=100 kills in so many runs.
"""

import contextlib
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moeplan.errors import RankError
from moeplan.traces import dataset
from moeplan.traces.reader import Trace
from moeplan.workers import SERIAL, Workers, opened
from moeplan.workers.tasks import FEWER
from tests.workers import cases
from tests.workers.interrupted import gone, started

KILL_RUNS = int(os.environ.get("MOEPLAN_KILL_RUNS", "2"))
LOST = f"a worker process died 3 times at one task (SIGKILL); {FEWER}"


def test_a_task_that_kills_every_worker_is_one_clear_line() -> None:
    with opened("2") as workers, pytest.raises(RankError) as refused:
        workers.submit(cases.dying, 0).result()
    assert str(refused.value) == LOST


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trace, bytes]]:
    """A trace of twelve parts, each a run of its own, and its statistics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "RUN_VALUES", 1)
        trace = cases.written(tmp_path_factory.mktemp("in_parts") / "traces")
        yield trace, pickle.dumps(cases.described(trace, SERIAL))


@pytest.mark.parametrize("seed", range(KILL_RUNS))
def test_workers_killed_at_random_leave_the_same_bytes_or_one_line(in_parts: tuple[Trace, bytes], seed: int) -> None:
    trace, expected = in_parts
    killer = Killer(seed)
    with opened("2") as workers:
        killer.start()
        while killer.is_alive():
            assert bytes_or_line(trace, workers) in (expected, LOST)
        assert bytes_or_line(trace, workers) == expected


def bytes_or_line(trace: Trace, workers: Workers) -> bytes | str:
    try:
        return pickle.dumps(cases.described(trace, workers))
    except RankError as error:
        return str(error)


class Killer(threading.Thread):
    """Kills a worker at random every so often, up to four in all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def run(self) -> None:
        for _ in range(self._random.randint(1, 4)):
            time.sleep(self._random.uniform(0, 0.8))
            while not (pids := my_workers()):
                time.sleep(0.01)
            os.kill(self._random.choice(pids), signal.SIGKILL)


def my_workers() -> list[int]:
    """Worker processes of this one."""
    found = list[int]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # zombies, too
            found += [child.pid] * ("spawn_main" in " ".join(child.cmdline()))
    return found


def test_a_result_that_cannot_be_sent_is_said() -> None:
    with opened("2") as workers, pytest.raises(RuntimeError, match="function that cannot be sent"):
        workers.submit(cases.unsendable).result()


# Ctrl-C


def test_ctrl_c_ends_what_was_started_at_once(tmp_path: Path) -> None:
    process, worker = started(tmp_path, "2")
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, errors = process.communicate(timeout=20)
    assert time.monotonic() - begun < 10
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert (out, errors.count("Traceback")) == ("closed\n", 1)
    assert gone(worker)


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process, worker = started(tmp_path, "2")
    process.kill()
    process.communicate(timeout=20)
    assert gone(worker)
