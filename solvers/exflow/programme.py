"""The placement programme: which device each expert of each layer lives on, so that most affinity stays near.

Legend: L MoE layers; E experts per layer (layers of a sub-programme may differ); D devices; P places, S of each device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Ints
from ..outcome import ROUNDING

Layout = list[Ints]  # the device of every expert `[E]`, a layer; arrays are replaced, never written


@dataclass(frozen=True, slots=True)
class Programme:
    """One home for every expert of every layer, to keep the most weight near.

    Notes
    -----
    ::

        max sum_l sum_{a,b} W[l,a,b] near[x[l,a], x[l+1,b]]      s.t. (1) |{a : x[l,a] = d}| <= S[d]
    """

    weights: Sequence[Floats]  #: W, float64 `[E_l, E_l+1]` for every layer pair, at least 0
    sizes: tuple[int, ...]  #: E_l, experts of each layer
    slots: Ints  #: S, int64 `[D]`
    near: Floats  #: What a transition is worth by the devices it joins, `[D, D]`, symmetric, largest on the diagonal
    devices_per_node: int  #: `near` does not change when nodes trade places, or devices inside a node
    places: Ints = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", np.repeat(np.arange(len(self.slots)), self.slots))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.sizes)

    @property
    def node_worth(self) -> float:
        """Worth of a transition to another device of the node; 0 on one level of links."""
        return float(self.near[0, 1]) if 1 < self.devices_per_node < len(self.slots) else 0.0

    @property
    def has_spare_slots(self) -> bool:
        """Check whether homes leave slots to replicas, of which the programme knows nothing."""
        return len(self.places) > max(self.sizes)

    def first_layout(self) -> Layout:
        """Experts in their own order."""
        return [self.places[:size].copy() for size in self.sizes]

    def of_nodes(self) -> "Programme":
        """Programme of nodes: each expert on one, to keep the most weight on nodes."""
        slots_N = self.slots.reshape(-1, self.devices_per_node).sum(axis=1)
        return Programme(self.weights, self.sizes, slots_N, np.eye(len(slots_N)), 1)

    def inside(self, node: int, members: Layout) -> "Programme":
        """Programme of a node's devices: each of its experts on one, to keep the most weight on devices.

        Parameters
        ----------
        members
            The experts of the node, a layer; transitions that leave it are dropped.
        """
        weights = [self.weights[cut][np.ix_(*members[cut : cut + 2])] for cut in range(len(self.weights))]
        slots_G = self.slots[node * self.devices_per_node :][: self.devices_per_node]
        return Programme(weights, tuple(map(len, members)), slots_G, np.eye(len(slots_G)), len(slots_G))

    def members(self, nodes: Layout) -> list[Layout]:
        """The experts of every node, layer by layer, by the node of every expert."""
        num_nodes = len(self.slots) // self.devices_per_node
        return [[np.flatnonzero(node_E == node) for node_E in nodes] for node in range(num_nodes)]

    def joined(self, members: list[Layout], inside: list[Layout]) -> Layout:
        """The layout of every node's experts, by the devices that they have inside it."""
        layout = [np.empty(size, dtype=np.int64) for size in self.sizes]
        for node, (member, within) in enumerate(zip(members, inside, strict=True)):
            for device_E, member_E, within_E in zip(layout, member, within, strict=True):
                device_E[member_E] = node * self.devices_per_node + within_E
        return layout

    def before(self, layout: Layout, layer: int) -> Floats:
        """Worth of each device to each expert of a layer because of the layer before, `[E, D]`."""
        return np.asarray(self.weights[layer - 1].T @ self.near[layout[layer - 1]])

    def after(self, layout: Layout, layer: int) -> Floats:
        """Worth of each device to each expert of a layer because of the layer after, `[E, D]`."""
        return np.asarray(self.weights[layer] @ self.near[layout[layer + 1]])

    def worth(self, layout: Layout, layer: int) -> Floats:
        """Worth of each device to each expert of a layer, its neighbours fixed, `[E, D]`."""
        worth_ED = np.zeros((self.sizes[layer], len(self.slots)))
        if layer > 0:
            worth_ED += self.before(layout, layer)
        if layer < self.num_layers - 1:
            worth_ED += self.after(layout, layer)
        return worth_ED

    def spread(self, share: NDArray[np.number]) -> Floats:
        """Worth of each device next to shares on devices, `[E, D]`: the shares times `near`, node by node."""
        node_EN = share.reshape(len(share), -1, self.devices_per_node).sum(axis=2)
        on_node_ED = np.repeat(self.node_worth * node_EN, self.devices_per_node, axis=1)
        return np.asarray((self.near[0, 0] - self.node_worth) * share + on_node_ED)

    def cut_value(self, layout: Layout, cut: int) -> float:
        """The value of layer pair (cut, cut + 1)."""
        return float((self.weights[cut] * self.near[layout[cut][:, None], layout[cut + 1]]).sum())

    def value(self, layout: Layout) -> float:
        """The value of a layout."""
        return sum(self.cut_value(layout, cut) for cut in range(len(self.weights)))


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of the objective and limits besides the weights between layers."""

    #: Weights of pairs inside each layer `[L, E, E]`, symmetric; the diagonal counts for nothing
    beside: Floats | None = None
    #: load, cap: `[L, E]`, and the most of it that a device may hold in each layer `[L]`; None: no limit
    load: Floats | None = None
    cap: Floats | None = None
    #: int64 `[L, E]`: the expert that replicas share, -1 without; twins keep to different devices
    twin: Ints | None = None

    @property
    def plain(self) -> bool:
        """Check whether nothing counts besides."""
        return self.beside is None and self.cap is None and self.twin is None

    def of_node(self, members: Layout) -> "Terms":
        """The pairs of a node's experts, a layer; layers with fewer of them are padded with what weighs nothing.

        Caps and twins do not go with them.
        """
        assert self.cap is None
        assert self.twin is None
        if self.beside is None:
            return Terms()
        most = max(map(len, members))
        beside = np.zeros((len(members), most, most))
        for layer, member_E in enumerate(members):
            beside[layer, : len(member_E), : len(member_E)] = self.beside[layer][np.ix_(member_E, member_E)]
        return Terms(beside)

    def inside(self, programme: Programme, layout: Layout, layer: int) -> float:
        """The value of the pairs inside a layer."""
        if self.beside is None:
            return 0.0
        near_EE = programme.near[layout[layer][:, None], layout[layer]]
        weight_EE = self.beside[layer, : len(near_EE), : len(near_EE)]
        return float((weight_EE * near_EE).sum() - weight_EE.diagonal() @ near_EE.diagonal()) / 2

    def value(self, programme: Programme, layout: Layout) -> float:
        """The value of a layout with the pairs inside layers."""
        return programme.value(layout) + sum(self.inside(programme, layout, i) for i in range(len(layout)))


class Incumbent:
    """The best layout so far, kept where an interrupted search leaves it.

    Parameters
    ----------
    target
        A bound; a layout that reaches it is optimal and ends the search.
    on_improvement
        Called with the value of each better layout.
    start
        The first layout; by default experts in their own order.
    terms
        Terms that count for the value besides the programme.
    """

    def __init__(
        self,
        programme: Programme,
        target: float = np.inf,
        on_improvement: Callable[[float], None] | None = None,
        *,
        start: Layout | None = None,
        terms: Terms | None = None,
    ) -> None:
        self.layout = programme.first_layout() if start is None else start
        self.value = (terms or Terms()).value(programme, self.layout)
        self.target = target
        self._on_improvement = on_improvement

    def offer(self, layout: Layout, value: float) -> None:
        """Keep `layout` if it is better, or as good (a kick may then lead on from it)."""
        better = value > self.value
        if value >= self.value:
            self.layout, self.value = list(layout), value
        if better and self._on_improvement:
            self._on_improvement(value)

    @property
    def optimal(self) -> bool:
        """Check whether the value meets the bound, up to rounding."""
        return self.value >= self.target * (1 - ROUNDING)
