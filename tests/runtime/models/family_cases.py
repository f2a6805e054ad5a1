"""Models of transformers under plans, as the ranks of a test world run them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
from tests.runtime.models.huggingface_models import make_model
from tests.runtime.plans import made_plan

BATCHES, LENGTH = (2, 1), 9


@dataclass(frozen=True)
class Family:
    """A family under a dispatch model, two ranks with these experts a layer."""

    name: str
    dispatch: str = "standard"
    sets: tuple[tuple[int, ...], ...] = ((1, 4, 5), (0, 2, 3))
    degrees: tuple[int, int] | None = None
    top_k: int = 2

    def model(self) -> nn.Module:
        return make_model(self.name, num_experts_per_tok=self.top_k)

    def plan(self) -> Plan:
        num_layers = len(routed_blocks(self.model()))
        rows = [[list(held) for held in (self.sets if layer % 2 else self.sets[::-1])] for layer in range(num_layers)]
        if len({len(held) for held in self.sets}) > 1:
            rows = [[list(held) for held in self.sets]] * num_layers
        pipeline = None
        if self.degrees is not None:
            forward, backward = self.degrees
            pipeline = PipelineDecision(forward=(forward,) * num_layers, backward=(backward,) * num_layers)
        model = ModelSpec(
            name=self.name, layer_ids=tuple(range(num_layers)), num_experts=6, top_k=self.top_k, hidden_size=32
        )
        placement = Placement.from_sets(rows, 6, ReplicaRule.EVEN)
        return made_plan(Cluster(1, 2), model, placement, pipeline=pipeline)

    def tokens(self) -> torch.Tensor:
        return torch.randint(64, (sum(BATCHES), LENGTH), generator=torch.Generator().manual_seed(7))

    def upstream(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(8)
        return torch.randn(sum(BATCHES), LENGTH, 64, generator=generator, dtype=torch.float64)


@dataclass
class Outcome:
    """Logits and gradients of a rank."""

    logits: np.ndarray
    gradients: dict[str, np.ndarray]


def run_families(world: World, families: Sequence[Family]) -> list[Outcome]:
    """What this rank has of each."""
    return [_run(world.rank, family) for family in families]


def _run(rank: int, family: Family) -> Outcome:
    mine = slice(sum(BATCHES[:rank]), sum(BATCHES[: rank + 1]))
    plan = family.plan()
    model = parallelize(family.model(), plan, dispatch=family.dispatch, gradients="sum")  # type: ignore[arg-type]
    trains = family.dispatch == "standard"
    with torch.set_grad_enabled(trains):
        logits = model(family.tokens()[mine])
    if trains:
        (logits * family.upstream()[mine]).sum().backward()
    found = {name.replace("experts.local", "experts"): p.grad for name, p in model.model.named_parameters()}
    return Outcome(logits.detach().numpy(), {name: g.numpy() for name, g in found.items() if g is not None})
