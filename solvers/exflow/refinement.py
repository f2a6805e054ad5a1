"""Layouts from finer ones: devices cut into parts that a search handles well, and the parts put together again.

Legend: L MoE layers; E experts a layer; D devices of S slots; Q parts.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .budget import Budget
from .incumbent import Incumbent
from .programme import Layout, Programme
from .terms import Terms

__all__ = ["num_parts", "refined"]

MERGE_WORK = 1e7  # to put the parts together, at most; and as much as finding them at most
Search = Callable[[Programme, Terms, Budget, np.random.Generator, Incumbent], None]


def num_parts(programme: Programme, terms: Terms, widest: int) -> int:
    """Into how many equal parts of 2 to `widest` slots each device can be cut, the fewest; 1 where it should not be."""
    slots = int(programme.slots[0])
    if (
        slots <= widest
        or (programme.slots != slots).any()
        or programme.node_worth
        or terms.cap is not None
        or terms.twin is not None
    ):
        return 1
    return next((k for k in range(2, slots // 2 + 1) if slots % k == 0 and slots // k <= widest), 1)


def refined(
    programme: Programme, terms: Terms, parts: int, budget: Budget, rng: np.random.Generator, search: Search
) -> Layout:
    """The layout of the best one found for parts, each of one device in all layers, and the best devices for these."""
    num_devices = len(programme.slots)
    slots_Q = np.repeat(programme.slots // parts, parts)
    fine = Programme(programme.weights, programme.sizes, slots_Q, np.eye(len(slots_Q)), len(slots_Q))
    found = Incumbent(fine, terms=terms)
    search(fine, terms, budget, rng, found)
    together = Terms(_flow(programme, terms, found.layout, len(slots_Q))[None])
    merge = Programme([], (len(slots_Q),), np.full(num_devices, parts), programme.near, programme.devices_per_node)
    merged = Incumbent(merge, terms=together)
    merging = Budget(min(MERGE_WORK, budget.total), budget.remaining_s)
    search(merge, together, merging, rng, merged)
    budget.settle(merging)
    return [merged.layout[0][part_E] for part_E in found.layout]


def _flow(programme: Programme, terms: Terms, layout: Layout, num_parts: int) -> NDArray[np.float64]:
    """The weight between parts, symmetric, `[Q, Q]`."""
    joined = list(zip(programme.weights, layout[:-1], layout[1:], strict=True))
    if terms.beside is not None:
        joined += [(weight[: len(e), : len(e)] / 2, e, e) for weight, e in zip(terms.beside, layout, strict=True)]
    flow_QQ = np.zeros((num_parts, num_parts))
    for weight_EE, here_E, there_E in joined:
        np.add.at(flow_QQ, (here_E[:, None], there_E), weight_EE)
    return flow_QQ + flow_QQ.T
