"""Training loops in DistributedDataParallel and FSDP2 with spread experts, against the same loop in one process.

State dicts of single ranks are loaded where they were saved and refused under another placement.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.gradients import clip_grad_norm_, expert_parameters
from moeplan.runtime.whole import full_optimizer_state, full_state_dict, keep_held
from tests.runtime.rank_cases import Case
from tests.runtime.worlds import by_rank, close, own, refusal_of

CASES = {
    "even": Case("standard", (4, 4), (2, 3), seed=1, gradients=True),
    "replicas": Case("standard", (6, 7), (2, 2), seed=2, gradients=True, rule="even"),
    "degrees over replicas": Case(
        "standard", (6, 6), (2, 2), gradients=True, rule="even", seed=35, top_k=4, forward=(2, 1, 4), backward=(1, 3, 2)
    ),
    "a device without slots": Case("standard", (0, 8), (2, 2), seed=3, gradients=True),
}
WORK = [(name, "ddp", 1.0) for name in CASES] + [("even", "fsdp", 1.0), ("replicas", "fsdp", 1.0), ("even", "ddp", 1e9)]


STEPS, RELOADED_BEFORE = 4, 2
SAVED = Case("standard", (4, 4), (2, 3), seed=1)
OTHER = replace(SAVED, seed=2)
ON_ONE = replace(SAVED, slots=(0, 8))
Reloaded = tuple[bool, bool, str]


@dataclass
class Trained:
    """What a loop leaves: the norm before each step, the whole model and the whole state of its optimizer."""

    norms: list[float]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]


Left = tuple[list[list[Trained]], list[Reloaded]]


@pytest.fixture(scope="module")
def left() -> Left:
    """What each loop left, by rank; and what became of states of single ranks, by rank."""
    loops, reloaded = zip(*by_rank(2, every, WORK), strict=True)
    return [list(ranks) for ranks in zip(*loops, strict=True)], list(reloaded)


@pytest.fixture(scope="module")
def trained(left: Left) -> list[list[Trained]]:
    return left[0]


def every(world: World, work: list[tuple[str, str, float]]) -> tuple[list[Trained], Reloaded]:
    return [together(world, CASES[name], wrapper, max_norm) for name, wrapper, max_norm in work], reload()


def alone(case: Case, max_norm: float) -> Trained:
    """The loop in one process; its loss is the mean of the ranks'."""
    model, norms = case.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        (model(case.tokens()) * case.upstream()).sum().div(len(case.slots)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, model.state_dict(), optimizer.state_dict())


def together(world: World, case: Case, wrapper: str, max_norm: float) -> Trained:
    """The loop on ranks, in "ddp", saved and loaded into another model between, or "fsdp"; what only rank 0 has."""
    mine = own(case.batches, world.rank)
    model, optimizer = _made(case, wrapper)
    norms = []
    for step in range(STEPS):
        if wrapper == "ddp" and step == RELOADED_BEFORE:
            model, optimizer = _reloaded(case, model, optimizer)
        (model(case.tokens()[mine], case.samples()[mine]) * case.upstream()[mine]).sum().backward()
        norms.append(clip_grad_norm_(model, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, full_state_dict(model), full_optimizer_state(model, optimizer))


def _made(case: Case, wrapper: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = parallelize(case.model(), case.plan(), dispatch="standard")
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, ignored_params=set(expert_parameters(model)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _reloaded(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Another model under another placement, with what a checkpoint on rank 0 held."""
    saved = [full_state_dict(model), full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(saved)
    model, optimizer = _made(replace(case, seed=case.seed + 1), "ddp")
    inner: Any = model.module
    inner.model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    keep_held(model, optimizer)
    return model, optimizer


def reload() -> Reloaded:
    """Whether a rank's own state fills an empty model, with experts and without, and what it is told elsewhere."""
    saved = parallelize(SAVED.model(), SAVED.plan()).model.state_dict()
    elsewhere = parallelize(SAVED.model(), OTHER.plan()).model
    return fills(SAVED), fills(ON_ONE), refusal_of(lambda: elsewhere.load_state_dict(saved))


def fills(case: Case) -> bool:
    """Whether a state goes into a model of other weights."""
    saved = parallelize(case.model(), case.plan()).model.state_dict()
    model = parallelize(OTHER.model(), case.plan()).model
    model.load_state_dict(saved)
    return all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())


@pytest.mark.parametrize("index", range(len(WORK)), ids=map(str, WORK))
def test_a_loop_over_spread_experts_is_that_of_one_process(index: int, trained: list[list[Trained]]) -> None:
    name, _, max_norm = WORK[index]
    expected, (whole, other) = alone(CASES[name], max_norm), trained[index]
    assert whole.norms == other.norms == pytest.approx(expected.norms, rel=1e-10)
    assert list(whole.state) == list(expected.state)
    assert all(close(whole.state[key], value, 1e-9) for key, value in expected.state.items())
    assert not other.state
    assert not other.optimizer


@pytest.mark.parametrize("index", range(len(WORK)), ids=map(str, WORK))
def test_the_whole_state_of_the_optimizer_is_that_of_one_process(index: int, trained: list[list[Trained]]) -> None:
    expected, whole = alone(CASES[WORK[index][0]], WORK[index][2]).optimizer, trained[index][0].optimizer
    assert whole["param_groups"] == expected["param_groups"]
    assert list(whole["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert set(whole["state"][number]) == set(state)
        assert all(close(whole["state"][number][name], value, 1e-9) for name, value in state.items())


def test_the_state_of_one_rank_is_loaded_under_its_own_placement_only(left: Left) -> None:
    for rank, (filled, filled_on_one, refusal) in enumerate(left[1]):
        saved, here = (", ".join(map(str, case.placement().held(0, rank))) for case in (SAVED, OTHER))
        assert saved != here
        assert filled
        assert filled_on_one
        words = f"layers.0.moe.experts: the state is of experts {saved}, this rank holds {here}; it was saved by"
        assert refusal.startswith(f"MismatchError: {words}")
