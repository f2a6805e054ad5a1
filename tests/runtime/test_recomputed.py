"""Blocks that run again in the backward pass (checkpointing), with replicas and with a rank without experts."""

import copy
from typing import Any

import torch

from moeplan.errors import UsageError
from moeplan.profilers.world import World, run_world
from moeplan.runtime import parallelize
from moeplan.runtime.engine.stopwatch import stopwatch
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.expert_parallel import ExpertParallelModel
from tests.runtime.rank_cases import Case

EMPTY = Case("standard", (8, 0), (2, 2), gradients=True, seed=40, forward=(2, 2, 2), top_k=1)
REPLICAS = Case("standard", (6, 6), (2, 2), gradients=True, seed=9, rule="even")


def run_again(world: World, _payload: None) -> list[Any]:
    """Whether gradients agree, the laps of a rank without experts, and what two open forwards are told."""
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    gradients = [_gradients(EMPTY, mine, again=again) for again in (False, True)]
    agree = [torch.allclose(one, other, rtol=1e-12) for one, other in zip(*gradients, strict=True)]
    with stopwatch() as laps:
        parallelize(EMPTY.model(), EMPTY.plan())(EMPTY.tokens()[mine])
    return [len(agree), all(agree), {part: len(times) for part, times in laps.items()}, _told(mine), _traffic(mine)]


def _gradients(case: Case, mine: slice, *, again: bool) -> list[torch.Tensor]:
    model = parallelize(case.model(), case.plan())
    if again:
        _checkpoint(model)
    model(case.tokens()[mine]).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _traffic(mine: slice) -> list[Traffic]:
    """Of the later of two forwards, before and after the blocks of both have run again."""
    model, tokens = parallelize(EMPTY.model(), EMPTY.plan()), EMPTY.tokens()[mine]
    _checkpoint(model)
    both = model(tokens).square().sum() + model(tokens[:, :2]).square().sum()
    before = model.traffic
    both.backward()
    return [before, model.traffic]


def _checkpoint(model: ExpertParallelModel) -> None:
    from torch.utils.checkpoint import checkpoint

    def checkpointed(forward: Any) -> Any:
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)

    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.moe.forward = checkpointed(layer.moe.forward)


def _told(mine: slice) -> str:
    model, tokens = parallelize(REPLICAS.model(), REPLICAS.plan()), REPLICAS.tokens()[mine]
    copy.deepcopy(model)
    _checkpoint(model)
    for _ in range(2):  # forwards whose backward has run, or never will, are no others
        model(tokens).square().sum().backward()
        model(tokens)
    both = model(tokens).square().sum() + model(tokens[:, :4]).square().sum()
    try:
        both.backward()
    except UsageError as error:
        return str(error)
    return "accepted"


def test_gradients_are_the_same_and_other_turns_are_refused() -> None:
    by_rank = run_world(2, run_again, timeout_s=60)
    assert by_rank is not None
    for count, agree, laps, told, (before, after) in by_rank:
        assert sum(before.loads) > 0 or before.copies > 0
        assert before == after
        assert count > 10
        assert agree
        assert laps == {"dispatch": 6, "experts": 6, "combine": 6}
        assert told.startswith("two checkpointed forwards before one backward under a placement with replicas")
