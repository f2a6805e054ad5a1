"""Real worlds of gloo ranks, joined by our own processes."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from moeplan.errors import RankError, UsageError
from moeplan.profilers.world import World, run_world
from tests.profilers.small_cases import by_halves


def adds(world: World, payload: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([payload * world.rank])
    dist.all_reduce(total)
    world.report(world.rank)
    place = world.size, len(world.hosts), len(set(world.hosts)), world.device
    return {"rank": world.rank, "total": total, "place": place, "threads": torch.get_num_threads()}


def fails_before_a_collective(world: World, how: Callable[[], object]) -> None:
    import torch.distributed as dist

    if world.rank == 1:
        how()
    dist.barrier()


def adds_on_its_node(world: World, _payload: None) -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    node = world.of_node()
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=node.group)
    return node.rank, node.size, total.item()


def test_every_rank_runs_in_one_group_and_its_tensors_come_back() -> None:
    heard: list[int] = []
    results = run_world(2, adds, 2.0, on_progress=heard.append)
    assert results is not None
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["total"].item() for result in results] == [2.0] * 2
    assert [result["place"] for result in results] == [(2, 2, 1, "cpu")] * 2
    assert all(result["threads"] * 2 <= max(2, len(os.sched_getaffinity(0))) for result in results)
    assert sorted(heard) == [0, 1]


def test_the_ranks_of_a_node_are_a_world_of_their_own() -> None:
    found = run_world(4, adds_on_its_node, host_of=by_halves)
    assert found == [(0, 2, 1.0), (1, 2, 1.0), (0, 2, 5.0), (1, 2, 5.0)]


@pytest.mark.parametrize(
    ("how", "told"),
    [(partial(os._exit, 7), r"died \(exit code 7\)"), (partial(time.sleep, 600), "did not answer within 2 s")],
)
def test_a_rank_that_dies_or_hangs_is_named_and_not_its_peers(how: Callable[[], object], told: str) -> None:
    with pytest.raises(RankError, match=f"^rank 1 {told}"):
        run_world(2, fails_before_a_collective, how, timeout_s=2)


@pytest.mark.parametrize("num_ranks", [None, 0, -1, 257])
def test_an_impossible_number_of_local_ranks_is_refused(num_ranks: int | None) -> None:
    with pytest.raises(UsageError, match="expected 1 to 256"):
        run_world(num_ranks, adds)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="expected cpu or cuda"):
        run_world(1, adds, device="tpu")


def test_a_launched_world_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="4 ranks asked for in a launched world of 2"):
        run_world(4, adds)
