"""The inputs of a solve, checked, and the goal, programme and terms they make.

Legend: L MoE layers; E experts per layer; N nodes of G devices, D in all, S slots of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..arrays import Floats, Ints, checked_counts
from ..bounds import KeptBound
from ..cost import HopsKept, hops_kept, inter_ratio, link_cost
from ..outcome import Objective
from ..placement import Placement, slots_for
from .caps import capped_layout
from .programme import Layout, Programme, Terms

Level = Literal["device", "node"]
MAX_CELLS = 2**24
MOST_EXPONENT = 300  # of weights that are taken as they are
CAP_SHARE = 0.2  # of the time, at most, to find a layout within a cap


@dataclass(frozen=True, slots=True)
class Goal:
    """Hops kept on one node, cost of hops on several.

    Notes
    -----
    A transition that stays on its device is worth rho, on its node rho - 1, else 0; rho is the cost of a hop between
    nodes in hops inside one, and 1 on a single node. With KD and KN the transitions kept on devices and nodes,

        value = (rho - 1) KN + KD,    hops_kept = value / total,    hop_cost = rho - value / total
    """

    cluster: Cluster  #: N nodes of G devices
    total: float  #: W.sum(), the transitions there are, and the pairs
    #: Whether replicas make what is kept an expectation (`cost.hops_kept`), which the figure's name then says
    expected: bool
    paired: bool = False  #: Whether pairs of experts of one layer count as transitions do

    @property
    def rho(self) -> float:
        """Cost of a hop between nodes, in hops inside a node."""
        return inter_ratio(self.cluster) if self.cluster.num_nodes > 1 else 1.0

    @property
    def near(self) -> Floats:
        """Worth of a transition by the devices it joins, `[D, D]`."""
        return self.rho - link_cost(self.cluster)

    def value(self, kept: HopsKept) -> float:
        """The value of what a placement keeps."""
        return (self.rho - 1) * float(kept.node.sum()) + float(kept.device.sum())

    def levels(self, slots: Ints) -> Mapping[Level, Ints]:
        """The slots `[D]` of every device and, where links are of two levels, of every node `[N]`."""
        if self.rho == 1 or self.cluster.devices_per_node == 1:
            return {"device": slots}
        return {"device": slots, "node": slots.reshape(self.cluster.num_nodes, -1).sum(axis=1)}

    def bound(self, kept: Mapping[Level, KeptBound]) -> KeptBound:
        """Upper bound of any placement's value, from bounds of the transitions kept at each of the `levels`."""
        device, node = kept["device"], kept.get("node", kept["device"])
        return KeptBound((self.rho - 1) * node.value + device.value, device.kinds | node.kinds)

    def objective(self, value: float) -> Objective:
        """The figure that a value is reported as; with no transitions at all nothing hops."""
        share = value / self.total if self.total else self.rho
        prefix = "expected_" if self.expected else ""
        if self.cluster.num_nodes == 1:
            return Objective(f"{prefix}{'affinity' if self.paired else 'hops'}_kept", share, "max")
        cost = max(self.rho - share, 0.0)  # rounding takes a bound below
        return Objective(f"{prefix}{'affinity' if self.paired else 'hop'}_cost", cost, "min")


@dataclass(frozen=True, slots=True)
class Problem:
    """Placement problem with its goal, programme and terms."""

    weights: Floats  #: W `[L-1, E, E]`
    loads: Floats  #: `[L, E]`
    goal: Goal
    programme: Programme
    terms: Terms
    start: Layout | None = None  #: A layout within the caps, where there are caps
    hurried: bool = False  #: Whether time ended the search for it
    unit: float = 1.0  #: What the weights given were divided by

    @classmethod
    def of(
        cls,
        transitions: ArrayLike,
        cluster: Cluster,
        coactivation: ArrayLike | None,
        loads: ArrayLike | None,
        max_load: float | None,
        slots: int | Sequence[int] | NDArray[np.integer] | None,
        time_limit_s: float,
    ) -> "Problem":
        """The problem of a caller's arrays; `strategy.solve` says what they are and what is refused."""
        num_cuts, num_experts = (*np.shape(transitions), 0, 0)[:2]
        weights_LEE = checked_counts(transitions, "transitions", (num_cuts, num_experts, num_experts))
        slots_D = slots_for(num_experts, cluster.num_devices, slots)
        beside_LEE = None if coactivation is None else _beside(coactivation, num_cuts + 1, num_experts)
        unit = _unit(weights_LEE, beside_LEE)
        weights_LEE, beside_LEE = weights_LEE / unit, None if beside_LEE is None else beside_LEE / unit
        loads_LE = _loads(weights_LEE, loads)
        total = float(weights_LEE.sum()) + (0.0 if beside_LEE is None else float(beside_LEE.sum()) / 2)
        goal = Goal(cluster, total, expected=bool(slots_D.sum() > num_experts), paired=beside_LEE is not None)
        programme = _programme(weights_LEE, goal, slots_D)
        if slots_D.max() == 1 and not programme.node_worth:
            beside_LEE = None  # no two experts of a layer meet
        if max_load is None:
            return cls(weights_LEE, loads_LE, goal, programme, Terms(beside_LEE), unit=unit)
        if goal.expected or not 1 <= max_load < np.inf:
            raise UsageError(
                f"max load {max_load:g} for {num_experts} experts in {slots_D.sum():,} slots; expected 1 or more (of"
                " the mean device load) and as many slots as experts, since replicas share loads as tokens come"
            )
        start, cap_L, hurried = capped_layout(loads_LE, slots_D, max_load, time_limit_s=CAP_SHARE * time_limit_s)
        terms = Terms(beside_LEE, loads_LE, cap_L)
        return cls(weights_LEE, loads_LE, goal, programme, terms, start, hurried, unit)

    def value(self, placement: Placement) -> float:
        """Value of a placement, more is better."""
        group = self.goal.cluster.devices_per_node
        value = self.goal.value(hops_kept(self.weights, placement, group))
        if self.terms.beside is None:
            return value
        for layer, weight_EE in enumerate(self.terms.beside):
            held_ED = placement.holds(layer).astype(np.float64)
            near_EE = (held_ED @ held_ED.T > 0).astype(np.float64)
            if self.goal.rho > 1:
                held_EN = held_ED.reshape(len(held_ED), -1, group).sum(axis=2)
                near_EE += (self.goal.rho - 1) * (held_EN @ held_EN.T > 0)
            value += float((weight_EE * near_EE).sum()) / 2
        return value


def _unit(*weights: Floats | None) -> float:
    """1; of weights so large or small that their squares would leave the floats' range, a power of two near them."""
    largest = max((float(weight.max(initial=0.0)) for weight in weights if weight is not None), default=0.0)
    if largest == 0.0 or 2.0**-MOST_EXPONENT < largest < 2.0**MOST_EXPONENT:
        return 1.0
    return float(2.0 ** max(np.floor(np.log2(largest)), -1022))


def _beside(coactivation: ArrayLike, num_layers: int, num_experts: int) -> Floats:
    """The pairs as symmetric weights without a diagonal, `[L, E, E]`."""
    beside_LEE = checked_counts(coactivation, "coactivation", (num_layers, num_experts, num_experts))
    beside_LEE = (beside_LEE + beside_LEE.transpose(0, 2, 1)) / 2
    return np.asarray(beside_LEE * (1 - np.eye(num_experts)))


def _loads(weights_LEE: Floats, loads: ArrayLike | None) -> Floats:
    """The loads given; else the transitions that leave each expert, in the last layer those that enter it, `[L, E]`."""
    if loads is not None:
        return checked_counts(loads, "loads", (len(weights_LEE) + 1, weights_LEE.shape[1]))
    if not len(weights_LEE):
        return np.ones((1, weights_LEE.shape[1]))
    return np.concatenate([weights_LEE.sum(axis=2), weights_LEE[-1:].sum(axis=1)])


def _programme(weights_LEE: Floats, goal: Goal, slots_D: Ints) -> Programme:
    """One home for every expert."""
    num_experts, num_devices = weights_LEE.shape[1], len(slots_D)
    if max(num_devices**2, num_experts * int(slots_D.sum())) > MAX_CELLS:
        raise UsageError(
            f"{num_experts} experts in {slots_D.sum():,} slots on {num_devices:,} devices; exflow takes at most"
            f" {int(MAX_CELLS**0.5):,} devices, and experts x slots up to {MAX_CELLS:,}"
        )
    sizes = (num_experts,) * (len(weights_LEE) + 1)
    return Programme(list(weights_LEE), sizes, slots_D, goal.near, goal.cluster.devices_per_node)
