"""The staged solve: nodes first, then the devices inside each, transitions that leave the node dropped.

Legend: L MoE layers; E experts a layer; N nodes of G devices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .budget import Budget
from .programme import Incumbent, Layout, Programme, Terms

__all__ = ["Stage", "joined", "members_of", "staged"]

NODE_SHARE = 0.7  # of the budget; the rest goes to the devices inside the nodes
Search = Callable[[Programme, Terms, Budget, np.random.Generator, Incumbent], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """Cost of a layout after a stage of the search.

    Parameters
    ----------
    name
        "nodes", "devices" or "joint".
    inter_hops, intra_hops
        The shares of transitions (and of a layer's pairs) that leave their node, and their device but not their node.
    """

    name: str
    inter_hops: float
    intra_hops: float

    @classmethod
    def of(cls, name: str, programme: Programme, terms: Terms, layout: Layout) -> "Stage":
        """The stage that a layout is the end of."""
        met = list(zip(programme.weights, layout[:-1], layout[1:], strict=True))
        if terms.beside is not None:
            met += zip(terms.beside / 2, layout, layout, strict=True)
        total = sum(float(weight.sum()) for weight, *_ in met) or 1.0
        apart = [
            sum(float(weight[here[:, None] // size != there // size].sum()) for weight, here, there in met) / total
            for size in (programme.devices_per_node, 1)
        ]
        return cls(name, apart[0], apart[1] - apart[0])


def staged(
    programme: Programme, terms: Terms, budget: Budget, rng: np.random.Generator, search: Search
) -> tuple[Layout, tuple[Stage, ...]]:
    """The layout that keeps most on nodes, and given that most on devices (the paper's two stages), and the stages."""
    num_nodes = len(programme.slots) // programme.devices_per_node
    nodes = _solved(programme.of_nodes(), terms, budget, NODE_SHARE, rng, search)
    members = members_of(programme, nodes)
    subs = [programme.inside(node, member) for node, member in enumerate(members)]
    in_order = joined(programme, members, [sub.first_layout() for sub in subs])
    after_nodes = Stage.of("nodes", programme, terms, in_order)
    inside = [
        _solved(sub, terms.of_node(member), budget, 1 / (num_nodes - node), rng, search)
        for node, (sub, member) in enumerate(zip(subs, members, strict=True))
    ]
    layout = joined(programme, members, inside)
    return layout, (after_nodes, Stage.of("devices", programme, terms, layout))


def members_of(programme: Programme, nodes: Layout) -> list[Layout]:
    """The experts of every node, layer by layer, by the node of every expert."""
    num_nodes = len(programme.slots) // programme.devices_per_node
    return [[np.flatnonzero(node_E == node) for node_E in nodes] for node in range(num_nodes)]


def joined(programme: Programme, members: list[Layout], inside: list[Layout]) -> Layout:
    """The layout of every node's experts, by the devices that they have inside it."""
    layout = [np.empty(size, dtype=np.int64) for size in programme.sizes]
    for node, (member, within) in enumerate(zip(members, inside, strict=True)):
        for device_E, member_E, within_E in zip(layout, member, within, strict=True):
            device_E[member_E] = node * programme.devices_per_node + within_E
    return layout


def _solved(
    programme: Programme, terms: Terms, budget: Budget, share: float, rng: np.random.Generator, search: Search
) -> Layout:
    """The best layout found for one level of links."""
    incumbent, part = Incumbent(programme, terms=terms), budget.part(share)
    search(programme, terms, part, rng, incumbent)
    budget.settle(part)
    return incumbent.layout
