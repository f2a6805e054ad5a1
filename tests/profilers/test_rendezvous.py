"""Launched worlds, by torchrun and as srun would: every way in which a rank can fail is named on every rank."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import RankError, UsageError
from moeplan.profilers import rendezvous
from moeplan.profilers.rendezvous import gathered
from moeplan.profilers.world import World

TIMEOUT_S = 4.0
SCRIPT = """
import os, sys
from moeplan.errors import MoeplanError
from moeplan.profilers.world import run_world
from tests.profilers.test_rendezvous import TARGETS, TIMEOUT_S, terms
try:
    for name in sys.argv[1:]:
        results = run_world(None, TARGETS[name], name, timeout_s=TIMEOUT_S, terms=terms)
        os.write(1, f"result {results}\\n".encode())  # one write: lines of ranks must not mix
except MoeplanError as error:
    os.write(1, f"error {error}\\n".encode())
    os._exit(error.exit_code)  # at once: the slow end of an interpreter would give others time
"""


def adds(world: World, _payload: str) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    return total.item()


def hangs(world: World, _payload: str) -> None:
    import torch.distributed as dist

    if world.rank == 1:
        time.sleep(600)
    dist.barrier()


def refuses(world: World, _payload: str) -> None:
    import torch.distributed as dist

    if world.rank == 1:
        raise UsageError("this rank cannot")
    dist.barrier()


def dies(world: World, _payload: str) -> None:
    import torch.distributed as dist

    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stops(world: World, _payload: str) -> None:
    import torch.distributed as dist

    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


TARGETS = {
    "adds": adds,
    "hangs": hangs,
    "refuses": refuses,
    "disagrees": adds,
    "disagrees late": adds,
    "dies": dies,
    "stops": stops,
}


def terms(world: World, payload: str) -> dict[str, str]:
    odd = payload.startswith("disagrees") and world.rank == 1
    if payload == "disagrees late" and world.rank == 2:
        ctypes.PyDLL(None).sleep(2)  # holds all threads of this process
    return {"version": "1", "quick": str(odd)}


def launched(*names: str, script: Path, num_ranks: int = 3, stopped: int | None = None) -> list[tuple[int, str]]:
    """Exit code and output of each rank that a launcher started as srun does, the `stopped` one when others ended."""
    with socket.socket() as probe:
        while True:
            port = 15_000 + int.from_bytes(os.urandom(2)) % 17_000
            try:
                probe.bind(("localhost", port))
                break
            except OSError:
                continue
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *names],
            env=environment(
                SLURM_PROCID=str(rank),
                SLURM_NTASKS=str(num_ranks),
                SLURM_STEP_NODELIST="localhost",
                SLURM_JOB_ID=str(port - 15_000),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for number, rank in enumerate(ranks):
            if number != stopped:
                rank.wait(timeout=90)
        if stopped is not None:
            ranks[stopped].kill()
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def environment(**more: str) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_as_srun_starts_them_ranks_meet_and_a_hung_one_is_named_and_ended_on_every_rank(script: Path) -> None:
    found = launched("adds", "hangs", script=script)
    assert [code for code, _ in found] == [6, 6, 6]
    assert ["result [3.0, 3.0, 3.0]" in output for _, output in found] == [True, False, False]
    assert all("rank 1 did not answer within 4 s" in output for _, output in found), found
    assert all("Traceback" not in output for _, output in found)


@pytest.mark.parametrize(
    ("name", "codes", "told"),
    [
        ("refuses", [6, 2, 6], "rank 1: this rank cannot"),
        ("disagrees", [4, 4, 4], "rank 1 disagrees with rank 0 about quick: rank 1 has True, rank 0 False"),
        ("disagrees late", [4, 4, 4], "rank 1 disagrees with rank 0 about quick: rank 1 has True, rank 0 False"),
    ],
)
def test_a_rank_that_fails_or_disagrees_is_named_on_every_rank(
    script: Path, name: str, codes: list[int], told: str
) -> None:
    found = launched(name, script=script)
    assert [code for code, _ in found] == codes, found
    assert all(told in output for _, output in found), found


def test_of_four_ranks_only_the_one_that_was_killed_is_named(script: Path) -> None:
    found = launched("dies", script=script, num_ranks=4)
    assert [code for code, _ in found] == [6, 6, -signal.SIGKILL, 6], found
    assert all("rank 2 died or stopped" in found[rank][1] for rank in (0, 1, 3)), found


def test_a_stopped_rank_0_which_keeps_the_store_ends_the_others(script: Path) -> None:
    found = launched("stops", script=script, stopped=0)
    assert [code for code, _ in found[1:]] == [6, 6], found
    assert all("moeplan: rank 0 did not answer within 4 s" in output for _, output in found[1:]), found


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
    monkeypatch.setattr(rendezvous, "end", told.append)
    monkeypatch.setattr(rendezvous, "READ_S", 0.0)
    with rendezvous.watchdog(Deaf(), 2, 3, 60.0):  # type: ignore[arg-type]
        time.sleep(1.0)
    assert told == ["rank 2 cannot reach rank 0, which keeps the store of this world"]


def test_a_process_whose_errors_nobody_reads_any_more_still_ends() -> None:
    code = "import sys; from moeplan.profilers.rendezvous import end; sys.stdin.read(); end('a word')"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stderr.close()
        process.stdin.close()
        assert process.wait(timeout=60) == RankError.exit_code


def test_under_torchrun_it_joins_that_world_again_and_again_and_names_a_rank_that_hangs(script: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script), "adds", "adds", "hangs"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = sorted(done.stdout.splitlines())
    told = ["error rank 1 did not answer within 4 s", *["result None"] * 2, *["result [1.0, 1.0]"] * 2]
    assert len(lines) == len(told), done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True)), lines
