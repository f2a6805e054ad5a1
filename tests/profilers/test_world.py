"""Real worlds of gloo ranks: joined by our own processes, and by torchrun."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import RankError, UsageError
from moeplan.profilers.launch import found_launch
from moeplan.profilers.world import World, run_world


def adds(world: World, payload: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([payload * world.rank])
    dist.all_reduce(total)
    world.report(world.rank)
    place = world.size, len(world.hosts), len(set(world.hosts)), world.device
    return {"rank": world.rank, "total": total, "place": place, "threads": torch.get_num_threads()}


def dies_in_a_collective(world: World, _payload: None) -> None:
    import torch.distributed as dist

    if world.rank == 1:
        os._exit(7)
    dist.barrier()


def hangs_before_a_collective(world: World, _payload: None) -> None:
    import torch.distributed as dist

    if world.rank == 1:
        time.sleep(600)
    dist.barrier()


TARGETS = {"adds": adds, "hangs": hangs_before_a_collective}


def test_every_rank_runs_in_one_group_and_its_tensors_come_back() -> None:
    heard: list[int] = []
    results = run_world(2, adds, 2.0, on_progress=heard.append)
    assert results is not None
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["total"].item() for result in results] == [2.0] * 2
    assert [result["place"] for result in results] == [(2, 2, 1, "cpu")] * 2
    assert all(result["threads"] * 2 <= max(2, len(os.sched_getaffinity(0))) for result in results)
    assert sorted(heard) == [0, 1]


def test_a_rank_that_dies_in_a_collective_is_named_and_not_its_peers() -> None:
    with pytest.raises(RankError, match=r"^rank 1 died \(exit code 7\)"):
        run_world(2, dies_in_a_collective)


def test_a_rank_that_hangs_is_named_and_not_those_that_wait_for_it() -> None:
    with pytest.raises(RankError, match=r"^rank 1 did not answer within 2 s"):
        run_world(2, hangs_before_a_collective, timeout_s=2)


@pytest.mark.parametrize("num_ranks", [None, 0, -1, 257])
def test_an_impossible_number_of_local_ranks_is_refused(num_ranks: int | None) -> None:
    with pytest.raises(UsageError, match="expected 1 to 256"):
        run_world(num_ranks, adds)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="expected cpu or cuda"):
        run_world(1, adds, device="tpu")


LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = """
import os, sys
from moeplan.errors import MoeplanError
from moeplan.profilers.world import run_world
from tests.profilers.test_world import TARGETS
try:
    for name in sys.argv[1:]:
        results = run_world(None, TARGETS[name], 1.0, timeout_s=6)
        totals = None if results is None else [result["total"].item() for result in results]
        os.write(1, f"result {totals}\\n".encode())  # one write: lines of ranks must not mix
except MoeplanError as error:
    os.write(1, f"error {error}\\n".encode())
    sys.exit(error.exit_code)
"""


def test_under_torchrun_it_joins_that_world_again_and_again_and_names_a_rank_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*LAUNCHER, str(tmp_path / "script.py"), "adds", "adds", "hangs"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = sorted(done.stdout.splitlines())
    told = ["error rank 1 did not answer within 6 s", *["result None"] * 2, *["result [1.0, 1.0]"] * 2]
    assert len(lines) == len(told), done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True)), lines


ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", **ADDRESS}, (3, 4)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", **ADDRESS}, (1, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "0"}, None),
    ],
)
def test_the_environment_tells_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: tuple[int, int] | None
) -> None:
    _only(monkeypatch, environment)
    found = found_launch()
    assert (found and (found.rank, found.size)) == told


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "MASTER_ADDR and MASTER_PORT is not"),
        ({"RANK": "4", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "4", **ADDRESS}, "expected 0 <= RANK < WORLD_SIZE"),
    ],
)
def test_a_broken_launch_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    _only(monkeypatch, environment)
    with pytest.raises(UsageError, match=message):
        found_launch()


def test_a_launched_world_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, {"RANK": "0", "WORLD_SIZE": "2", **ADDRESS})
    with pytest.raises(UsageError, match="4 ranks asked for in a launched world of 2"):
        run_world(4, adds)


def _only(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
