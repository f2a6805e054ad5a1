"""Replicas by the exact split of a step, on real ranks: the busiest device computes as little as can be."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.solvers import quota
from moeplan.solvers.replicas import ReplicaTable
from tests.runtime.rank_cases import Answer, Case, answer
from tests.runtime.worlds import by_case, close

WIDE = Case("standard", (4, 4, 4, 4), (4, 9, 0, 3), rule="quota", gradients=True, seed=71)
CASES = {
    "one node": WIDE,
    "two nodes, in chunks": replace(WIDE, nodes=2, forward=(2, 1, 3), backward=(1, 2, 2), seed=72),
    "top-1, unequal slots": replace(WIDE, slots=(6, 1, 3, 4), top_k=1, seed=73),
    "no replicas": replace(WIDE, slots=(2, 2, 2, 2), seed=74),
    "coherent": replace(WIDE, dispatch="coherent", gradients=False, seed=75),
}


@dataclass
class Split:
    """What a rank has of a case, and the gradients where every block runs again in the backward pass."""

    answer: Answer
    again: list[torch.Tensor]


def split(world: World, cases: list[Case]) -> list[Split]:
    return [Split(answer(world.rank, case), _again(world, case) if case.gradients else []) for case in cases]


def _again(world: World, case: Case) -> list[torch.Tensor]:
    """Gradients of two forwards before one backward, checkpointed."""
    from torch.utils.checkpoint import checkpoint

    model = parallelize(case.model(), case.plan(), gradients="sum")
    for layer in model.model.layers:  # type: ignore[union-attr]
        block, forward = layer.moe, layer.moe.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    first = sum(case.batches[: world.rank])
    mine = slice(first, first + case.batches[world.rank])
    both = [(model(case.tokens()[mine]) * case.upstream()[mine]).sum() / 2 for _ in range(2)]
    sum(both).backward()
    return [known.grad for block in model.blocks for known in block.parameters() if known.grad is not None]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Split]]:
    """By case, then rank."""
    return dict(zip(CASES, by_case(4, split, [*CASES.values()]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_one_process(name: str, answers: dict[str, list[Split]]) -> None:
    case, model = CASES[name], CASES[name].model()
    logits = model(case.tokens())
    (logits * case.upstream()).sum().backward()
    together = np.concatenate([rank.answer.logits for rank in answers[name]])
    assert close(together, logits.detach().numpy())
    if not case.gradients:
        return
    for weight, parameter in model.named_parameters():
        if ".experts." not in weight:
            continue
        assert parameter.grad is not None
        layer, rows = int(weight.split(".")[1]), np.zeros(parameter.shape)
        for rank in answers[name]:
            rows[rank.answer.owned[layer]] = rank.answer.gradients[weight]
        assert close(rows, parameter.grad.numpy())


@pytest.mark.parametrize("name", CASES)
def test_the_busiest_device_computes_the_least_that_it_can(name: str, answers: dict[str, list[Split]]) -> None:
    case, ranks = CASES[name], answers[name]
    placement = case.placement()
    for layer in range(case.num_layers):
        pairs = np.array([np.bincount(r.answer.routed[layer][2].ravel(), minlength=8) for r in ranks]).T
        holders = quota.holders_of(placement.physical_to_logical[layer], placement.slots, 8, 4 // case.nodes)
        least, _, _ = quota.least(pairs.sum(axis=1), holders)
        loads = [rank.answer.traffic.loads[layer] for rank in ranks]
        assert sum(loads) == pairs.sum()
        assert max(loads) == least


def test_split_steps_are_more_even_than_turns_and_stay_nearer(answers: dict[str, list[Split]]) -> None:
    ranks, placement = [split.answer for split in answers["one node"]], WIDE.placement()
    busiest, even, crossing, even_crossing = 0, 0, 0, 0
    for layer in range(WIDE.num_layers):
        table, load = ReplicaTable.of(placement, layer, 4, "even"), np.zeros(4, int)
        for home, rank in enumerate(ranks):
            sample, position, ids = rank.routed[layer]
            chosen = table.choose(ids, np.full(len(ids), home), sample + position)
            load += np.bincount(chosen.ravel(), minlength=4)
            even_crossing += sum(len({*row.tolist()} - {home}) for row in chosen)
        even += load.max()
        busiest += max(rank.traffic.loads[layer] for rank in ranks)
    crossing = sum(rank.traffic.copies for rank in ranks) // 2  # there and back
    assert busiest < even
    assert crossing < even_crossing


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradients])
def test_blocks_that_run_again_find_the_same_split(name: str, answers: dict[str, list[Split]]) -> None:
    for rank in answers[name]:
        once = [rank.answer.gradients[key] for key in sorted(rank.answer.gradients) if ".experts." in key]
        assert len(rank.again) == len(once) > 0
        for gradient, expected in zip(rank.again, once, strict=True):
            assert close(gradient.numpy(), expected)
