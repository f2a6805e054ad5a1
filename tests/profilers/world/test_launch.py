"""Launched worlds, by torchrun and as srun would: every way in which a rank can fail is named on every rank."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import RankError, UsageError
from moeplan.profilers.world import failures
from moeplan.profilers.world.launch import Launch, found_launch, gathered
from tests.builders import known
from tests.warm import warm

ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "17001"}
NAMES = ("RANK", "WORLD_SIZE", *SLURM, *ADDRESS, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_ID")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", **ADDRESS}, Launch(3, 4, "localhost", 29500)),
        ({**SLURM, **ADDRESS}, Launch(1, 2, "localhost", 29500)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "0"}, None),
    ],
)
def test_a_launch_is_found(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: Launch | None) -> None:
    _only(monkeypatch, environment)
    assert found_launch() == told


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("gpu[007-012,20]", "gpu007"),
        ("gpu[3,5-7]-ib,login", "gpu3-ib"),
        ("rack[1-2]n[04-05],x", "rack1n04"),
        ("a.cluster,b.cluster", "a.cluster"),
    ],
)
def test_under_srun_rank_0_is_on_the_steps_first_host(monkeypatch: pytest.MonkeyPatch, hosts: str, first: str) -> None:
    _only(monkeypatch, {**SLURM, "SLURM_JOB_NODELIST": "elsewhere", "SLURM_STEP_NODELIST": hosts})
    assert found_launch() == Launch(1, 2, first, 15_001)
    _only(monkeypatch, {**SLURM, "SLURM_JOB_NODELIST": hosts, "SLURM_STEP_ID": "2"})
    assert found_launch() == Launch(1, 2, first, 15_001 + 2 * 97)
    _only(monkeypatch, {**SLURM, **ADDRESS, "SLURM_JOB_NODELIST": hosts})
    assert found_launch() == Launch(1, 2, "localhost", 29500)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "MASTER_ADDR and MASTER_PORT is not"),
        ({**SLURM}, "SLURM_PROCID is set but MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", **SLURM, "SLURM_JOB_NODELIST": "a"}, "RANK is set but MASTER_ADDR and"),
        ({"RANK": "0", "WORLD_SIZE": "4", **ADDRESS, "MASTER_PORT": "http"}, "expected a port"),
        ({"RANK": "4", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
    ],
)
def test_a_broken_launch_is_told(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str) -> None:
    _only(monkeypatch, environment)
    with pytest.raises(UsageError, match=message):
        found_launch()


def _only(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


Launched = Callable[..., list[tuple[int, str]]]


def environment(**more: str) -> dict[str, Any]:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def started(folder: Path, script: str, *words: object) -> "subprocess.Popen[str]":
    """A script in a session of its own."""
    (folder / "script.py").write_text(script)
    command, pipe = [sys.executable, str(folder / "script.py"), *map(str, words)], subprocess.PIPE
    return subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def launched() -> Iterator[Launched]:
    """`launched(*targets, num_ranks=3, stopped=None)`: exit code and output of each rank, the stopped one the last."""
    with warm("tests.profilers.world.launched", "main", "moeplan.profilers.world", env=environment()) as start:

        def launch(*targets: str, num_ranks: int = 3, stopped: int | None = None) -> list[tuple[int, str]]:
            done = start([str(num_ranks), str(stopped), *targets], Path.cwd(), environment())
            return [(code, output) for code, output in json.loads(done.stdout)]

        yield launch


def test_as_srun_starts_them_ranks_meet_and_a_hung_one_is_named_and_ended_on_every_rank(launched: Launched) -> None:
    ended = launched("adds", "hangs")
    assert [code for code, _ in ended] == [6, 6, 6]
    assert ["result [3.0, 3.0, 3.0]" in output for _, output in ended] == [True, False, False]
    assert all("rank 1 did not answer within 4 s" in output for _, output in ended), ended
    assert all("Traceback" not in output for _, output in ended)


@pytest.mark.parametrize(
    ("name", "codes", "told"),
    [
        ("refuses", [6, 2, 6], "rank 1: this rank cannot"),
        ("disagrees", [4, 4, 4], "rank 1 disagrees with rank 0 about quick: rank 1 has True, rank 0 False"),
        ("disagrees late", [4, 4, 4], "rank 1 disagrees with rank 0 about quick: rank 1 has True, rank 0 False"),
    ],
)
def test_a_rank_that_fails_is_named_on_every_rank(launched: Launched, name: str, codes: list[int], told: str) -> None:
    ended = launched(name)
    assert [code for code, _ in ended] == codes, ended
    assert all(told in output for _, output in ended), ended


def test_of_four_ranks_only_the_one_that_was_killed_is_named(launched: Launched) -> None:
    ended = launched("dies", num_ranks=4)
    assert [code for code, _ in ended] == [6, 6, -signal.SIGKILL, 6], ended
    assert all("rank 2 died or stopped" in ended[rank][1] for rank in (0, 1, 3)), ended


def test_a_stopped_rank_0_which_keeps_the_store_ends_the_others(launched: Launched) -> None:
    ended = launched("stops", stopped=0)
    assert [code for code, _ in ended[1:]] == [6, 6], ended
    assert all("moeplan: rank 0 did not answer within 4 s" in output for _, output in ended[1:]), ended


class Gone:
    """A store whose rank 0 died while the ranks were joining."""

    def set(self, _key: str, _value: str) -> None:
        """What was sent before is lost."""

    def wait(self, _keys: list[str]) -> None:
        raise RuntimeError("Connection reset by peer")

    def check(self, _keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_a_rank_0_that_dies_before_all_have_joined_is_named() -> None:
    with pytest.raises(RankError, match="rank 2 cannot reach rank 0"):
        gathered(Gone(), "host", "here", 2, 3)  # type: ignore[arg-type]


class Deaf(Gone):
    """A store that takes the first count, and then nothing."""

    def add(self, _key: str, _value: int) -> int:
        return 1

    def clone(self) -> "Deaf":
        raise RuntimeError("Connection refused")


def test_a_rank_0_that_dies_as_a_watchdog_begins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []
    monkeypatch.setattr(failures, "end", told.append)
    monkeypatch.setattr(failures, "READ_S", 0.0)
    with failures.watchdog(Deaf(), 2, 3, 60.0):  # type: ignore[arg-type]
        time.sleep(1.0)
    assert told == ["rank 2 cannot reach rank 0, which keeps the store of this world"]


def test_a_process_whose_errors_nobody_reads_any_more_still_ends() -> None:
    code = "import sys; from moeplan.profilers.world.failures import end; sys.stdin.read(); end('a word')"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stderr=pipe) as process:
        known(process.stderr).close()
        known(process.stdin).close()
        assert process.wait(timeout=60) == RankError.exit_code


def test_under_torchrun_it_joins_that_world_again_and_again_and_names_a_rank_that_hangs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; from tests.profilers.world.launched import run; run(*sys.argv[1:])")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(script), "adds", "adds", "hangs"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    lines = sorted(done.stdout.splitlines())
    told = ["error rank 1 did not answer within 4 s", *["result None"] * 2, *["result [1.0, 1.0]"] * 2]
    assert len(lines) == len(told), done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True)), lines
