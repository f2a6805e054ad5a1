"""What the tokens of the emulated model ask for, and the plans that are made for it.

Legend: V kinds of token; L layers; K experts per token; E experts; I samples; S positions; D devices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import Decisions, PlacementDecision
from moeplan.runtime.plan import Inputs, Plan
from moeplan.solvers.placement import Placement
from moeplan.traces.model import Attention, ModelSpec

from ..routing import drawn, markov
from .model import Sizes

Array = np.ndarray
ALPHA = 2.5  # of samples' preferences, Dirichlet(2.5 / E): chosen so that re-homing saves what the paper's does
LEAST = 1e-9  # so that there are always two experts to choose from


@dataclass(frozen=True, slots=True)
class Workload:
    """A step: the experts of every kind of token, `[V, L, K]`, and the kinds of the samples of all ranks, `[I, S]`.

    Samples start on the ranks in order, the same number on each.
    """

    ids: Array
    tokens: Array
    num_experts: int

    def of_rank(self, rank: int, num_devices: int) -> Array:
        """The tokens that start on a rank, `[I / D, S]`."""
        return np.split(self.tokens, num_devices)[rank]

    @property
    def routed(self) -> Array:
        """The experts of each sample's tokens, `[I, S, L, K]`."""
        return np.asarray(self.ids[self.tokens])


def affine(rng: np.random.Generator, num_layers: int, num_experts: int, num_kinds: int) -> Array:
    """Kinds whose next expert depends on the last one (rows of Dirichlet(0.08), balanced), `[V, L, 1]`."""
    return drawn(rng, markov(rng, num_layers, num_experts), num_kinds)[:, :, None]


def with_second(rng: np.random.Generator, first: Array, num_experts: int) -> Array:
    """Kinds with a second expert each, whose next depends on the last second one, `[V, L, 2]`."""
    second = affine(rng, first.shape[1], num_experts, len(first))
    return np.concatenate([first, np.where(second == first, (second + 1) % num_experts, second)], axis=2)


def preferring(
    rng: np.random.Generator, shape: tuple[int, int], num_layers: int, num_experts: int, lasting: int
) -> Workload:
    """Samples that prefer experts of their own, two a token, the same for `lasting` layers, then others."""
    samples, length = shape
    ids = np.empty((samples, length, num_layers, 2), dtype=np.int64)
    for sample in range(samples):
        for layer in range(num_layers):
            if layer % lasting == 0:
                taste = rng.dirichlet(np.full(num_experts, ALPHA / num_experts)) + LEAST
            ids[sample, :, layer] = _two(rng, taste, length)
    kinds = np.arange(samples * length).reshape(shape)
    return Workload(ids.reshape(-1, num_layers, 2), kinds, num_experts)


def plan_of(cluster: Cluster, work: Workload, sizes: Sizes, placement: Placement | None, **decided: Any) -> Plan:
    """A plan with this placement, if any, and whatever else is decided."""
    _, num_layers, top_k = work.ids.shape
    model = ModelSpec(
        name="emulated",
        layer_ids=tuple(range(num_layers)),
        num_experts=work.num_experts,
        top_k=top_k,
        hidden_size=sizes.hidden_size,
        dtype_bytes=sizes.element_bytes,
        attention=Attention(kv_size=sizes.kv_size),
    )
    placed = None if placement is None else PlacementDecision.of(placement)
    decisions = Decisions(placement=placed, **decided)
    return Plan.make(
        strategies=("benchmark",), seed=0, cluster=cluster, model=model, inputs=Inputs(), decisions=decisions
    )


def _two(rng: np.random.Generator, taste: Array, length: int) -> Array:
    """Two experts per token, `[S, 2]`, the first drawn by taste: the order of Gumbel-perturbed tastes."""
    return np.argsort(-(np.log(taste) + rng.gumbel(size=(length, len(taste)))))[:, :2]
