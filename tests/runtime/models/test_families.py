"""Mixtral, Qwen3-MoE, OLMoE and gpt-oss over two ranks equal themselves in one process."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.world import World
from moeplan.runtime import parallelize
from moeplan.runtime.decisions import PipelineDecision
from moeplan.runtime.engine.experts import routed_blocks
from moeplan.runtime.plan import Plan
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.model import ModelSpec
from tests.runtime.models.huggingface_models import FAMILIES, make_model
from tests.runtime.plans import made_plan
from tests.runtime.worlds import by_case, close, own

BATCHES, LENGTH = (2, 1), 9


@dataclass(frozen=True)
class Family:
    """A family on two ranks with these experts a layer."""

    name: str
    sets: tuple[tuple[int, ...], ...] = ((1, 4, 5), (0, 2, 3))
    degrees: tuple[int, int] | None = None

    def model(self) -> nn.Module:
        return make_model(self.name)

    def plan(self) -> Plan:
        num_layers = len(routed_blocks(self.model()))
        rows = [[list(held) for held in (self.sets if layer % 2 else self.sets[::-1])] for layer in range(num_layers)]
        if len({len(held) for held in self.sets}) > 1:
            rows = [[list(held) for held in self.sets]] * num_layers
        pipeline = None
        if self.degrees is not None:
            forward, backward = self.degrees
            pipeline = PipelineDecision(forward=(forward,) * num_layers, backward=(backward,) * num_layers)
        model = ModelSpec(name=self.name, layer_ids=tuple(range(num_layers)), num_experts=6, top_k=2, hidden_size=32)
        placement = Placement.from_sets(rows, 6, ReplicaRule.EVEN)
        return made_plan(Cluster(1, 2), model, placement, pipeline=pipeline)

    def tokens(self) -> torch.Tensor:
        return torch.randint(64, (sum(BATCHES), LENGTH), generator=torch.Generator().manual_seed(7))

    def upstream(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(8)
        return torch.randn(sum(BATCHES), LENGTH, 64, generator=generator, dtype=torch.float64)


CASES = [
    *(Family(name) for name in FAMILIES),
    *(Family(name, degrees=(2, 3), sets=((0, 1, 2, 4), (1, 3, 4, 5))) for name in FAMILIES),
]


every_case = pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])


@dataclass
class Outcome:
    """Logits and gradients of a rank."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]


def run_families(world: World, families: Sequence[Family]) -> list[Outcome]:
    """What this rank has of each."""
    return [_run(world.rank, family) for family in families]


def _run(rank: int, family: Family) -> Outcome:
    mine = own(BATCHES, rank)
    model = parallelize(family.model(), family.plan(), gradients="sum")
    logits = model(family.tokens()[mine])
    (logits * family.upstream()[mine]).sum().backward()
    grads = {name.replace("experts.local", "experts"): p.grad for name, p in model.model.named_parameters()}
    return Outcome(logits.detach().numpy(), {name: g.numpy() for name, g in grads.items() if g is not None})


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    return by_case(2, run_families, CASES)


@functools.cache
def reference(case: Family) -> Outcome:
    model = case.model()
    logits = model(case.tokens()).logits
    (logits * case.upstream()).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(logits.detach().numpy(), gradients)


@every_case
def test_logits_equal_those_of_one_process(index: int, outcomes: list[list[Outcome]]) -> None:
    logits = np.concatenate([outcome.logits for outcome in outcomes[index]])
    assert close(logits, reference(CASES[index]).logits)


@every_case
def test_gradients_equal_those_of_one_process(index: int, outcomes: list[list[Outcome]]) -> None:
    case = CASES[index]
    table = case.plan().placement
    assert table is not None
    layers: dict[str, int] = {}
    for name, expected in reference(case).gradients.items():
        if ".experts." not in name:
            total = sum(outcome.gradients[name] for outcome in outcomes[index])
        else:
            layer = layers.setdefault(name.split(".experts.")[0], len(layers))
            total = np.zeros_like(expected)
            for rank, outcome in enumerate(outcomes[index]):
                total[table.physical_to_logical[layer, table.device_of_slot == rank]] = outcome.gradients[name]
        assert close(total, expected)
