"""What steps leave behind: no memory, no thread."""

import gc
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.engine.watch import watch
from moeplan.runtime.gradients import clip_grad_norm_
from tests.runtime.engine.alive import Alive
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import by_rank, own

WARM_UP, STEPS = 4, 16
CASES = {
    "standard": Case("standard", (5, 5), (4, 4), num_layers=1, gradients=True, length=8),
    "pipelined": Case("standard", (5, 5), (4, 4), num_layers=1, gradients=True, length=8, forward=(2,), backward=(4,)),
    "coherent": Case("coherent", (5, 5), (4, 4), num_layers=1, length=8),
}


@dataclass(frozen=True)
class Left:
    """Bytes of tensors and Python objects that half of the steps left; threads before, after, without the watch."""

    tensor_bytes: int
    objects: int
    threads: tuple[int, int, int]


def stepped(world: World, cases: list[Case]) -> list[Left]:
    return [_left(world, case) for case in cases]


def _left(world: World, case: Case) -> Left:
    spread = parallelize(case.model(), case.plan(), dispatch=case.dispatch)  # type: ignore[arg-type]
    loop = DistributedDataParallel(spread) if case.gradients else spread
    optimizer = torch.optim.AdamW(loop.parameters(), lr=0.0)  # routing, and so what is kept of it, stays
    tokens = case.tokens()[own(case.batches, world.rank)]

    def step() -> tuple[int, int]:
        with torch.set_grad_enabled(case.gradients):
            logits = loop(tokens)
        if case.gradients:
            logits.square().mean().backward()
            clip_grad_norm_(loop, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return alive.now, len(gc.get_objects())

    with Alive() as alive:
        for _ in range(WARM_UP):
            step()
        gc.freeze()
        threads = threading.active_count()
        held = np.array([step() for _ in range(STEPS)])
        after = threading.active_count()
    # Other threads hold some for a while, and let them go.
    tensor_bytes, objects = held[STEPS // 2 :].min(axis=0) - held[: STEPS // 2].min(axis=0)
    dist.barrier()  # the watch of a rank ends with that of rank 0
    watch().close()
    return Left(int(tensor_bytes), int(objects), (threads, after, threading.active_count()))


@pytest.fixture(scope="module")
def left() -> list[list[Left]]:
    """By rank, then case."""
    return by_rank(2, stepped, list(CASES.values()))


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_steps_leave_no_memory_and_no_thread_behind(index: int, left: list[list[Left]]) -> None:
    for rank in left:
        assert rank[index].tensor_bytes <= 0, left
        assert rank[index].objects < STEPS // 2, left
        started, after, without_watch = rank[index].threads
        assert after == started == without_watch + 3, left
