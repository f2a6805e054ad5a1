"""Launched worlds, by torchrun and as srun would: every way in which a rank can fail is named on every rank."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import UsageError
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
    sys.exit(error.exit_code)
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


TARGETS = {"adds": adds, "hangs": hangs, "refuses": refuses, "disagrees": adds}


def terms(world: World, payload: str) -> dict[str, str]:
    odd = payload == "disagrees" and world.rank == 1
    return {"version": "1", "quick": str(odd)}


def launched(*names: str, script: Path) -> list[tuple[int, str]]:
    """Exit code and output of each of three ranks that a launcher started as srun does."""
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
                SLURM_NTASKS="3",
                SLURM_STEP_NODELIST="localhost",
                SLURM_JOB_ID=str(port - 15_000),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
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
    ],
)
def test_a_rank_that_fails_or_disagrees_is_named_on_every_rank(
    script: Path, name: str, codes: list[int], told: str
) -> None:
    found = launched(name, script=script)
    assert [code for code, _ in found] == codes, found
    assert all(told in output for _, output in found), found


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
