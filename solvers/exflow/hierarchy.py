"""The staged solve: nodes first, then the devices inside each, transitions that leave the node dropped.

Legend: L MoE layers; E experts a layer; N nodes of G devices.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .budget import Budget
from .programme import Layout, Programme
from .search import Incumbent, search

__all__ = ["staged"]

NODE_SHARE = 0.5  # of the budget; the rest goes to the devices inside the nodes


def staged(programme: Programme, budget: Budget, rng: np.random.Generator) -> Layout:
    """The layout that keeps most on nodes, and given that most on devices (the paper's two stages)."""
    group = programme.devices_per_node
    num_nodes = len(programme.slots) // group
    slots_NG = programme.slots.reshape(num_nodes, group)
    nodes = _solved(programme.weights, programme.sizes, slots_NG.sum(axis=1), budget, NODE_SHARE, rng)
    layout = [np.empty(size, dtype=np.int64) for size in programme.sizes]
    for node in range(num_nodes):
        member = [np.flatnonzero(node_E == node) for node_E in nodes]
        weights = [programme.weights[cut][np.ix_(*member[cut : cut + 2])] for cut in range(len(programme.weights))]
        sizes = tuple(map(len, member))
        inside = _solved(weights, sizes, slots_NG[node], budget, 1 / (num_nodes - node), rng)
        for device_E, member_E, inside_E in zip(layout, member, inside, strict=True):
            device_E[member_E] = node * group + inside_E
    return layout


def _solved(
    weights: Sequence[NDArray[np.float64]],
    sizes: tuple[int, ...],
    slots: NDArray[np.int64],
    budget: Budget,
    share: float,
    rng: np.random.Generator,
) -> Layout:
    """The best layout found for one level of links."""
    programme = Programme(weights, sizes, slots, np.eye(len(slots)), len(slots))
    incumbent, part = Incumbent(programme), budget.part(share)
    search(programme, part, rng, incumbent)
    budget.settle(part)
    return incumbent.layout
