"""What hundreds of steps leave behind: no memory, no thread."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from moeplan.runtime.engine.watch import watch
from moeplan.runtime.gradients import clip_grad_norm_
from tests.runtime.rank_cases import Case

WARM_UP, STEPS = 200, 500
LEAST_LEAK_BYTES = 64 * 16 * 8  # one hidden vector a token and step
CASES = {
    "standard": Case("standard", (5, 5), (4, 4), num_layers=1, gradients=True, length=8),
    "pipelined": Case("standard", (5, 5), (4, 4), num_layers=1, gradients=True, length=8, forward=(2,), backward=(4,)),
    "coherent": Case("coherent", (5, 5), (4, 4), num_layers=1, length=8),
}


@dataclass(frozen=True)
class Left:
    """Bytes by which a process grew over the steps, its threads before and after them, and without the watch."""

    grown_bytes: int
    threads: tuple[int, int, int]


def stepped(world: World, cases: list[Case]) -> list[Left]:
    return [_left(world, case) for case in cases]


def _left(world: World, case: Case) -> Left:
    spread = parallelize(case.model(), case.plan(), dispatch=case.dispatch)  # type: ignore[arg-type]
    loop = DistributedDataParallel(spread) if case.gradients else spread
    optimizer = torch.optim.AdamW(loop.parameters(), lr=1e-3)
    tokens = case.tokens()[world.rank * 4 : world.rank * 4 + 4]

    def steps(number: int) -> int:
        for _ in range(number):
            with torch.set_grad_enabled(case.gradients):
                logits = loop(tokens)
            if case.gradients:
                logits.square().mean().backward()
                clip_grad_norm_(loop, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, threads = steps(WARM_UP), threading.active_count()
    grown, after = steps(STEPS) - before, threading.active_count()
    watch().close()
    return Left(grown, (threads, after, threading.active_count()))


@pytest.fixture(scope="module")
def left() -> list[list[Left]]:
    """By rank, then case."""
    by_rank = run_world(2, stepped, list(CASES.values()), timeout_s=120)
    assert by_rank is not None
    return by_rank


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_500_steps_leave_no_memory_and_no_thread_behind(index: int, left: list[list[Left]]) -> None:
    for rank in left:
        assert rank[index].grown_bytes < STEPS * LEAST_LEAK_BYTES, left
        started, after, without_watch = rank[index].threads
        assert after == started == without_watch + 3, left
