"""The placement programme: which device each expert of each layer lives on, so that most affinity stays near.

Legend: L MoE layers; E experts a layer (layers of a sub-programme may differ); D devices; P places, S of each device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout", "Programme"]

Layout = list[NDArray[np.int64]]  # the device of every expert `[E]`, a layer; arrays are replaced, never written


@dataclass(frozen=True, slots=True)
class Programme:
    """One home for every expert of every layer, to keep the most weight near.

    Parameters
    ----------
    weights
        W, float64 `[E_l, E_l+1]` for every layer pair, at least 0.
    sizes
        E_l, experts of each layer.
    slots
        S, int64 `[D]`.
    near
        What a transition is worth by the devices it joins, `[D, D]`, symmetric, largest on the diagonal.
    devices_per_node
        `near` does not change when nodes trade places, or devices inside a node.

    Notes
    -----
    ::

        max sum_l sum_{a,b} W[l,a,b] near[x[l,a], x[l+1,b]]      s.t. (1) |{a : x[l,a] = d}| <= S[d]
    """

    weights: Sequence[NDArray[np.float64]]
    sizes: tuple[int, ...]
    slots: NDArray[np.int64]
    near: NDArray[np.float64]
    devices_per_node: int
    places: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", np.repeat(np.arange(len(self.slots)), self.slots))

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.sizes)

    @property
    def node_worth(self) -> float:
        """What a transition to another device of the node is worth; 0 on one level of links."""
        return float(self.near[0, 1]) if 1 < self.devices_per_node < len(self.slots) else 0.0

    @property
    def has_spare_slots(self) -> bool:
        """Whether homes leave slots to replicas, of which the programme knows nothing."""
        return len(self.places) > max(self.sizes)

    def first_layout(self) -> Layout:
        """Experts in their own order."""
        return [self.places[:size].copy() for size in self.sizes]

    def of_nodes(self) -> "Programme":
        """Which node each expert lives on, to keep the most weight on nodes."""
        slots_N = self.slots.reshape(-1, self.devices_per_node).sum(axis=1)
        return Programme(self.weights, self.sizes, slots_N, np.eye(len(slots_N)), 1)

    def inside(self, node: int, members: Layout) -> "Programme":
        """Which device of a node each of its experts lives on, to keep the most weight on devices.

        Parameters
        ----------
        members
            The experts of the node, a layer; transitions that leave it are dropped.
        """
        weights = [self.weights[cut][np.ix_(*members[cut : cut + 2])] for cut in range(len(self.weights))]
        slots_G = self.slots[node * self.devices_per_node :][: self.devices_per_node]
        return Programme(weights, tuple(map(len, members)), slots_G, np.eye(len(slots_G)), len(slots_G))

    def before(self, layout: Layout, layer: int) -> NDArray[np.float64]:
        """What each device is worth to each expert of a layer because of the layer before, `[E, D]`."""
        return np.asarray(self.weights[layer - 1].T @ self.near[layout[layer - 1]])

    def after(self, layout: Layout, layer: int) -> NDArray[np.float64]:
        """What each device is worth to each expert of a layer because of the layer after, `[E, D]`."""
        return np.asarray(self.weights[layer] @ self.near[layout[layer + 1]])

    def worth(self, layout: Layout, layer: int) -> NDArray[np.float64]:
        """What each device is worth to each expert of a layer, its neighbours fixed, `[E, D]`."""
        worth_ED = np.zeros((self.sizes[layer], len(self.slots)))
        if layer > 0:
            worth_ED += self.before(layout, layer)
        if layer < self.num_layers - 1:
            worth_ED += self.after(layout, layer)
        return worth_ED

    def spread(self, share: NDArray[np.number]) -> NDArray[np.float64]:
        """What each device is worth next to shares on devices, `[E, D]`: the shares times `near`, node by node."""
        node_EN = share.reshape(len(share), -1, self.devices_per_node).sum(axis=2)
        on_node_ED = np.repeat(self.node_worth * node_EN, self.devices_per_node, axis=1)
        return np.asarray((self.near[0, 0] - self.node_worth) * share + on_node_ED)

    def cut_value(self, layout: Layout, cut: int) -> float:
        """The value of layer pair (cut, cut + 1)."""
        return float((self.weights[cut] * self.near[layout[cut][:, None], layout[cut + 1]]).sum())

    def value(self, layout: Layout) -> float:
        """The value of a layout."""
        return sum(self.cut_value(layout, cut) for cut in range(len(self.weights)))
