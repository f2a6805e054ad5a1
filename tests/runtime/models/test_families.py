"""Mixtral, Qwen3-MoE, OLMoE and gpt-oss over two ranks equal themselves in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PipelineDecision
from moeplan.runtime.engine.experts import routed_blocks
from moeplan.runtime.engine.owners import owners_of
from moeplan.runtime.plan import Plan
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec
from tests.builders import known
from tests.runtime.models.huggingface_models import FAMILIES, make_model
from tests.runtime.plans import made_plan
from tests.runtime.worlds import by_case, close, own

BATCHES, LENGTH = (2, 1), 9
SETS = ((0, 1, 2, 4), (1, 3, 4, 5))


@dataclass
class Outcome:
    """Logits and gradients of a rank, or of one process."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]


def plan_of(family: str, num_layers: int) -> Plan:
    """Two ranks with a replica of two experts each, which change places from layer to layer, in other chunks a pass."""
    rows = [[list(held) for held in (SETS if layer % 2 else SETS[::-1])] for layer in range(num_layers)]
    pipeline = PipelineDecision(forward=(2,) * num_layers, backward=(3,) * num_layers)
    model = ModelSpec(name=family, layer_ids=tuple(range(num_layers)), num_experts=6, top_k=2, hidden_size=32)
    return made_plan(Cluster(1, 2), model, Placement.from_sets(rows, 6, ReplicaRule.EVEN), pipeline=pipeline)


def outcome_of(model: Any, mine: slice) -> Outcome:
    """Logits and gradients of some of the samples."""
    tokens = torch.randint(64, (sum(BATCHES), LENGTH), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(8)
    upstream = torch.randn(sum(BATCHES), LENGTH, 64, generator=generator, dtype=torch.float64)
    logits = model(tokens[mine])
    logits = getattr(logits, "logits", logits)
    (logits * upstream[mine]).sum().backward()
    named = getattr(model, "model", model) if hasattr(model, "blocks") else model
    gradients = {name.replace("experts.local", "experts"): p.grad for name, p in named.named_parameters()}
    return Outcome(logits.detach().numpy(), {name: g.numpy() for name, g in gradients.items() if g is not None})


def run_families(world: World, families: Sequence[str]) -> list[Outcome]:
    """What this rank has of each."""
    outcomes = []
    for family in families:
        model = make_model(family)
        plan = plan_of(family, len(routed_blocks(model)))
        outcomes.append(outcome_of(parallelize(model, plan, gradients="sum"), own(BATCHES, world.rank)))
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """By family, then rank."""
    return dict(zip(FAMILIES, by_case(2, run_families, FAMILIES), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_one_process(family: str, outcomes: dict[str, list[Outcome]]) -> None:
    expected, layers = outcome_of(make_model(family), slice(None)), dict[str, int]()
    assert close(np.concatenate([outcome.logits for outcome in outcomes[family]]), expected.logits)
    table = known(plan_of(family, len(routed_blocks(make_model(family)))).placement)
    for name, gradient in expected.gradients.items():
        if ".experts." not in name:
            total = sum(outcome.gradients[name] for outcome in outcomes[family])
        else:
            layer = layers.setdefault(name.split(".experts.")[0], len(layers))
            total = np.zeros_like(gradient)
            for rank, outcome in enumerate(outcomes[family]):
                total[owners_of(table.holds(layer)) == rank] = outcome.gradients[name]
        assert close(total, gradient)
