"""What ranks find of fp8 rows; imported by spawned processes too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import CondensationDecision
from moeplan.runtime.engine.traffic import Traffic
from moeplan.runtime.expert_parallel import ExpertParallelModel
from tests.runtime.rank_cases import Case, Run, passed, same
from tests.runtime.worlds import refusal_of

PLAIN = Case("standard", (2, 2, 2, 2), (3, 2, 1, 2), rule="even", gradients=True, seed=50, length=9)
CONDENSED = replace(PLAIN, batches=(3, 2, 2, 2), length=20, seed=30)
WIDE = replace(PLAIN, slots=(8, 8, 8, 8), rule="nearest", seed=57)
CASES: dict[str, tuple[Case, dict[str, Any]]] = {  # with what is decided beside
    "plain": (PLAIN, {}),
    "four experts a token": (replace(PLAIN, top_k=4, slots=(4, 1, 1, 2), seed=51), {}),
    "one expert a token": (replace(PLAIN, top_k=1, seed=52), {}),
    "chunks": (replace(PLAIN, forward=(2, 3, 1), backward=(1, 2, 4), seed=53), {}),
    "replicas": (replace(PLAIN, slots=(3, 4, 2, 3), seed=54), {}),
    "replicas in chunks": (replace(PLAIN, slots=(3, 4, 2, 3), forward=(2, 1, 3), seed=55), {}),
    "an empty rank": (replace(PLAIN, batches=(3, 0, 2, 2), seed=56), {}),
    "a fixed capacity": (replace(PLAIN, forward=(2, 1, 2), capacity_factor=8.0, seed=58), {}),
    "means": (CONDENSED, {"tau": 0.3}),
    "medoids in chunks": (replace(CONDENSED, forward=(3, 1, 2), seed=32), {"tau": 0.25, "medoid": True}),
}
# What one process cannot tell: coarse numbers, and the devices of a step's exact split.
COARSE: dict[str, tuple[Case, dict[str, Any]]] = {
    "float32": (replace(PLAIN, dtype=torch.float32, forward=(2, 2, 2)), {}),
    "bfloat16": (replace(PLAIN, dtype=torch.bfloat16, forward=(2, 1, 2)), {}),
    "quota": (replace(PLAIN, slots=(3, 4, 2, 3), rule="quota", seed=54), {}),
    "every expert everywhere": (WIDE, {}),
}
HIDDEN = 16


@dataclass
class Wired:
    """What a rank has of a case: logits, gradients and traffic, and those of other ways to run it."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]
    traffic: Traffic
    owned: list[list[int]]
    again: bool  #: Whether checkpointed blocks give the same bits
    amp: tuple[np.ndarray, Traffic]  #: Logits and traffic under autocast to bfloat16
    bare: Run  #: Of a plan without fp8 rows
    #: Samples, positions and experts of its tokens by layer
    routed: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass
class Answer:
    """What a rank has of all cases, and what it was told where something cannot be."""

    cases: dict[str, Wired]
    refused: dict[str, str]


def run_wired(world: World, _payload: None) -> Answer:
    """The answer of a rank."""
    cases = {name: _wired(world.rank, *one) for name, one in (CASES | COARSE).items()}
    return Answer(cases, {name: refusal_of(attempt) for name, attempt in _attempts().items()})


def _wired(rank: int, case: Case, decided: dict[str, Any]) -> Wired:
    beside = {"condensation": CondensationDecision(**decided)} if decided else {}
    model = parallelize(case.model(), case.plan(wire="fp8", **beside), gradients="sum")
    found = passed(model, case, rank)
    routed = [(of.sample.numpy(), of.position.numpy(), of.ids.numpy()) for of in model.routed]
    other = parallelize(case.model(), case.plan(wire="fp8", **beside), gradients="sum")
    _checkpoint(other)
    again = same(passed(other, case, rank), found)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _, traffic = passed(parallelize(case.model(), case.plan(wire="fp8", **beside)), case, rank)
    bare = passed(parallelize(case.model(), case.plan(**beside), gradients="sum"), case, rank)
    return Wired(*found, [block.owned for block in model.blocks], again, (mixed, traffic), bare, routed)


def _checkpoint(model: ExpertParallelModel) -> None:
    for number, layer in enumerate(model.model.layers):  # type: ignore[arg-type]
        forward, reentrant = layer.moe.forward, number == 1
        layer.moe.forward = lambda *args, forward=forward, reentrant=reentrant: checkpoint(
            forward, *args, use_reentrant=reentrant
        )


def _attempts() -> dict[str, Callable[[], object]]:
    plan = PLAIN.plan(wire="fp8")
    return {
        "coherent": lambda: parallelize(PLAIN.model(), plan, dispatch="coherent"),
        "migrating": lambda: parallelize(PLAIN.model(), plan, dispatch="migrating"),
    }
