"""What a placement keeps near of other tokens than those it was made from, and how long the others' exchange takes.

Legend: L MoE layers; E experts; D devices; B steps, C link classes, x directions.
"""

from dataclasses import dataclass

import numpy as np

from moeplan.planner.evaluate.costs import CostModel
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, exflow
from moeplan.solvers.balance import balance
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.placement import Placement
from moeplan.solvers.seconds import exchange_seconds, slowest
from moeplan.traces.model import ModelSpec

from ...study import Settings

Array = np.ndarray
NODE = 4  # GPUs of one, in the paper
NUM_LAYERS = 12
SEEDS = 3
LINKS = ("intra=300:2", "inter=12.5:5")  # GB/s of NVLink 3 one way, and of two HDR200 rails among four GPUs; us
HIDDEN, ELEMENT_BYTES = 1024, 2
TOKENS_EACH = 1024  # of a GPU in a step
WORK = 5e7


@dataclass(frozen=True, slots=True)
class Kept:
    """The shares of transitions that stay on their GPU and on their node, and the loads' balance."""

    device: float
    node: float
    balance: float

    @classmethod
    def of(cls, transitions: Array, placement: Placement) -> "Kept":
        """Of these transitions `[L-1, E, E]`."""
        kept, total = hops_kept(transitions, placement, NODE), transitions.sum()
        loads = np.concatenate([transitions[:1].sum(axis=2), transitions.sum(axis=1)])
        return cls(float(kept.device.sum() / total), float(kept.node.sum() / total), balance(loads, placement))


def seeds_of(settings: Settings) -> int:
    """How many draws the figures are means of."""
    return 1 if settings.quick else SEEDS


def nodes_of(num_devices: int) -> Cluster:
    """Nodes of four GPUs, with the links that the paper's hardware has by its makers."""
    nodes = num_devices // NODE
    return Cluster.parse(f"{nodes}x{NODE}", LINKS if nodes > 1 else LINKS[:1])


def placed(fit: Array, cluster: Cluster) -> Placement:
    """ExFlow's, from transitions `[L-1, E, E]`; work ends the search, so that the same comes out again."""
    return exflow.solve(fit, cluster, work=WORK, time_limit_s=600).placement


def in_order(fit: Array, num_devices: int) -> Placement:
    """Experts in their own order."""
    return contiguous.solve(len(fit) + 1, fit.shape[1], Cluster(1, num_devices)).placement


def exchange_s(transitions: Array, placement: Placement, tokens: int = TOKENS_EACH) -> float:
    """Seconds that the layers' one all-to-all takes in context coherence, every GPU starting with as many tokens.

    Notes
    -----
    The tokens from device d to e before layer l+1 are `sum_{a on d, b on e} W[l, a, b]`, scaled to a step's tokens.
    """
    size = placement.num_devices
    cluster, layers = nodes_of(size), len(transitions)
    held = [placement.holds(layer).astype(float) for layer in range(layers + 1)]
    flow_LDD = np.array([held[at].T @ transitions[at] @ held[at + 1] for at in range(layers)])
    flow_LDD *= tokens * size / flow_LDD.sum(axis=(1, 2), keepdims=True)
    node_D = np.arange(size) // NODE
    near_DD = node_D[:, None] == node_D
    crossing = [near_DD & ~np.eye(size, dtype=bool), ~near_DD][: len(cluster.links)]
    copies_LCxD = np.array([[(flow_LDD * mask).sum(axis=axis) for axis in (2, 1)] for mask in crossing])
    copies_BLCxD = np.rint(copies_LCxD.transpose(2, 0, 1, 3)[None]).astype(np.int64)
    model = _model(layers + 1, transitions.shape[1])
    costs = CostModel.of(None, cluster, model, samples=False)
    assert costs is not None
    assert costs.exchange is not None
    return float(slowest(exchange_seconds(copies_BLCxD, HIDDEN * ELEMENT_BYTES, costs.exchange)).seconds.sum())


def _model(num_layers: int, num_experts: int) -> ModelSpec:
    return ModelSpec(
        name="GPT 350M MoE",
        layer_ids=tuple(range(num_layers)),
        num_experts=num_experts,
        top_k=1,
        hidden_size=HIDDEN,
        dtype_bytes=ELEMENT_BYTES,
    )
