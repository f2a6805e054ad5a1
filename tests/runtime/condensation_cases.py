"""What ranks find of copies that others stand for; imported by spawned processes too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers load it, each rank for itself where its nursery has not
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.condensation import Condensation
from moeplan.runtime.decisions import CondensationDecision
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.expert_parallel import ExpertParallelModel
from moeplan.runtime.plan import Plan
from moeplan.runtime.whole import full_state_dict
from tests.runtime.rank_cases import Case, passed, same
from tests.runtime.worlds import own, refusal_of

PLAIN = Case("standard", (2, 2, 2, 2), (3, 2, 2, 2), rule="even", gradients=True, seed=30, length=20)
GAINS = tuple(tuple(0.5 + 0.1 * (layer + expert) for expert in range(8)) for layer in range(3))
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "mean": (PLAIN, {"tau": 0.3}),
    "medoid": (PLAIN, {"tau": 0.3, "medoid": True}),
    "chunks": (replace(PLAIN, forward=(2, 3, 1), backward=(1, 2, 4), seed=31), {"tau": 0.3}),
    "medoid in chunks": (replace(PLAIN, forward=(3, 1, 2), seed=32), {"tau": 0.25, "medoid": True}),
    "replicas": (replace(PLAIN, slots=(3, 4, 2, 3), seed=33), {"tau": 0.35}),
    "four experts a token": (replace(PLAIN, top_k=4, slots=(4, 1, 1, 2), seed=34), {"tau": 0.32}),
    "gains": (replace(PLAIN, seed=35), {"tau": 0.3, "gains": GAINS}),
    "star": (replace(PLAIN, seed=36), {"criterion": "star", "threshold": 0.8}),
    "one expert a token": (replace(PLAIN, top_k=1, seed=39), {"tau": 0.4}),
    "an empty rank": (replace(PLAIN, batches=(3, 0, 2, 2), seed=37), {"tau": 0.3}),
}
# What one process cannot tell: thresholds in coarse numbers, and the devices of a step's exact split.
COARSE: dict[str, tuple[Case, dict[str, Any]]] = {
    "float32": (replace(PLAIN, dtype=torch.float32, forward=(2, 2, 2), seed=38), {"tau": 0.3}),
    "bfloat16": (replace(PLAIN, dtype=torch.bfloat16, forward=(2, 2, 2), seed=38), {"tau": 0.3}),
    "quota": (replace(PLAIN, slots=(3, 4, 2, 3), rule="quota", seed=33), {"tau": 0.35}),
}
LEARNT = Case("standard", (3, 3, 3, 3), (2, 2, 2, 2), rule="even", gradients=True, seed=41, num_layers=2, length=8)
TRAININGS: dict[str, dict[str, Any]] = {
    "share": {"tau": 0.3, "schedule": "share", "target": 0.4},
    "paper": {"criterion": "star", "schedule": "paper", "h_max": 0.9, "kappa": 3.0},
}
STEPS, RATE = 50, 0.1


@dataclass
class Condensed:
    """What a rank has of a case: logits, gradients, traffic, and those of other ways to run it."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    traffic: Traffic
    owned: list[list[int]]
    again: bool  #: Whether checkpointed blocks, under another tau when they run again, give the same bits
    bare: tuple[
        bool, bool
    ]  #: Whether tau None, and tau 0, give the bits and the traffic of a plan without the decision
    spared: tuple[int, int]  #: Vectors not sent in evaluation, and with `in_eval`


@dataclass
class Trained:
    """What a training leaves: the loss of every step, tau after it and the share saved in it, the model (rank 0)."""

    losses: list[float]
    tau: list[float | None]
    saved: list[float | None]
    state: dict[str, torch.Tensor]


@dataclass
class Answer:
    """What a rank has of `CASES` and `COARSE`, of `TRAININGS`, and what it was told where something cannot be."""

    cases: dict[str, Condensed]
    trained: dict[str, Trained]
    refused: dict[str, str]


def run_condensed(world: World, _payload: None) -> Answer:
    """The answer of a rank."""
    cases = {name: _condensed(world.rank, *one) for name, one in (CASES | COARSE).items()}
    trained = {name: _trained(world.rank, decided) for name, decided in TRAININGS.items()}
    return Answer(cases, trained, {name: refusal_of(attempt) for name, attempt in _attempts(world.rank).items()})


def plan_of(case: Case, **decided: Any) -> Plan:
    """The plan of a case that condenses."""
    return case.plan(condensation=CondensationDecision(**decided))


def _condensed(rank: int, case: Case, decided: dict[str, Any]) -> Condensed:
    plan = plan_of(case, **decided)
    model = parallelize(case.model(), plan, gradients="sum")
    logits, gradients, traffic = passed(model, case, rank)
    other = parallelize(case.model(), plan, gradients="sum")
    _checkpoint(other, reentrant=bool(case.forward))
    change = partial(setattr, other.condensation, "tau", 0.01)
    again = same(passed(other, case, rank, change), (logits, gradients, traffic))
    without = parallelize(case.model(), case.plan(), gradients="sum")
    expected, bare = passed(without, case, rank), list[bool]()
    for tau in (None, 0.0):
        unmoved = parallelize(case.model(), plan, gradients="sum")
        assert unmoved.condensation is not None
        unmoved.condensation.tau = tau
        bare.append(same(passed(unmoved, case, rank), expected))
    return Condensed(
        logits,
        gradients,
        traffic,
        [block.owned for block in model.blocks],
        again,
        (bare[0], bare[1]),
        _spared(model, case, rank),
    )


def _checkpoint(model: ExpertParallelModel, *, reentrant: bool = False) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        forward = layer.moe.forward
        layer.moe.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=reentrant)


def _spared(model: ExpertParallelModel, case: Case, rank: int) -> tuple[int, int]:
    assert model.condensation is not None
    mine, spared = own(case.batches, rank), list[int]()
    model.eval()
    for in_eval in (False, True):
        model.condensation.in_eval = in_eval
        with torch.no_grad():
            model(case.tokens()[mine], case.samples()[mine])
        spared.append(model.traffic.condensed)
    return spared[0], spared[1]


def loss_of(logits: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """The mean loss of some samples."""
    return (logits - upstream).square().mean()


def _trained(rank: int, decided: dict[str, Any]) -> Trained:
    mine, answer = own(LEARNT.batches, rank), Trained([], [], [], {})
    model = parallelize(LEARNT.model(), plan_of(LEARNT, **decided))
    assert model.condensation is not None
    loop = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(loop.parameters(), RATE)
    for step in range(STEPS):
        loss = loss_of(loop(LEARNT.tokens(step)[mine], LEARNT.samples()[mine]), LEARNT.upstream()[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        model.condensation.step(loss)
        answer.saved.append(model.condensation.saved)
        if step == STEPS // 2:  # as in a run that resumes
            kept, decision = model.condensation.state_dict(), model.condensation.decision
            model.condensation = Condensation(decision, model.blocks, model.condensation.group)
            model.condensation.load_state_dict(kept)
        answer.losses.append(loss.item())
        answer.tau.append(model.condensation.tau)
    answer.state = full_state_dict(loop)
    return answer


def _attempts(rank: int) -> dict[str, Callable[[], object]]:
    case, decided = PLAIN, {"tau": 0.3}
    plan, mine = plan_of(case, **decided), own(case.batches, rank)
    guessed = plan_of(case, criterion="star", threshold=0.9, s1=0.9, s2=0.3)

    def two(other: slice, tau: float | None = 0.3) -> None:
        model = parallelize(case.model(), plan)
        assert model.condensation is not None
        model.condensation.tau = tau
        _checkpoint(model)
        first = model(case.tokens()[mine])
        if other == slice(0):
            with torch.no_grad():
                model(case.tokens()[mine][:, :4])
            first.square().sum().backward()
        else:
            (first.square().sum() + model(case.tokens()[mine]).square().sum()).backward()

    return {
        "coherent": lambda: parallelize(case.model(), plan, dispatch="coherent"),
        "migrating": lambda: parallelize(case.model(), plan, dispatch="migrating"),
        "history": lambda: parallelize(case.model(), guessed),
        "two forwards": lambda: two(slice(1)),
        "another forward": lambda: two(slice(0)),
        "nothing condensed": lambda: two(slice(1), None) or two(slice(0), None),  # type: ignore[func-returns-value]
    }
