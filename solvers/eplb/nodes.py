"""Which node each expert group lives on, where groups must not be split between nodes.

Legend: L MoE layers; E experts a layer; N nodes of G devices; Q groups.
"""

from collections.abc import Iterator
from itertools import combinations
from math import factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bounds import lowest_max
from .pins import with_pins
from .published import pack
from .refined import refined
from .rows import Rows, has_form, pinned_groups

__all__ = ["Deal", "dealt_best", "published_groups", "refined_groups"]

MOST_WAYS = 1000  # to deal groups to nodes, of which the best is taken


def published_groups(
    loads: NDArray[np.float64],
    slots: NDArray[np.int64],
    pinned: NDArray[np.bool_],
    num_nodes: int,
    num_groups: int | None,
) -> NDArray[np.int64] | None:
    """The groups of every node, ascending, `[L, N, Q / N]`, as published; None where there is no hierarchical form.

    Groups, heaviest first, go to the least loaded node with room for one more, each node taking as many.
    """
    if num_groups is None or not has_form(slots, pinned, num_nodes, num_groups):
        return None
    load_LQ = _group_loads(loads, num_groups)
    room_N = np.full(num_nodes, num_groups // num_nodes)
    group_LQ, _ = pack(load_LQ, np.tile(np.arange(num_groups), (len(loads), 1)), room_N)
    pinned_NQ = pinned_groups(pinned, num_nodes, num_groups)
    pinned_LNQ = np.broadcast_to(pinned_NQ, (len(loads), *pinned_NQ.shape))
    return with_pins(group_LQ, load_LQ, room_N, pinned_LNQ).reshape(len(loads), num_nodes, -1)


def refined_groups(
    loads: NDArray[np.float64], pinned: NDArray[np.bool_], published: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The groups of every node, ascending, the published way refined for less load of the busiest node."""
    num_layers, num_nodes, each = published.shape
    load_LQ = _group_loads(loads, num_nodes * each)
    rows = Rows.of(load_LQ, np.full(num_nodes, each), pinned_groups(pinned, num_nodes, num_nodes * each), None)
    return refined(rows, published.reshape(num_layers, -1), num_layers).reshape(published.shape)


class Deal(NamedTuple):
    """The groups of every node, ascending, `[L, N, Q / N]`, and the load that no busiest device is below, `[L]`."""

    groups: NDArray[np.int64]
    least: NDArray[np.float64]


def dealt_best(loads: NDArray[np.float64], slots: NDArray[np.int64], num_nodes: int, each: int) -> Deal | None:
    """The best of all ways to deal groups to nodes, so many to each; None where there are too many.

    A node is worth the bound on its own busiest device (`lowest_max`).
    """
    num_layers, num_groups = len(loads), num_nodes * each
    if factorial(num_groups) > MOST_WAYS * factorial(each) ** num_nodes * factorial(num_nodes):
        return None
    node_C = list(combinations(range(num_groups), each))
    load_LCe = loads.reshape(num_layers, num_groups, -1)[:, np.array(node_C)].reshape(num_layers * len(node_C), -1)
    least_LC = lowest_max(load_LCe, slots[: len(slots) // num_nodes]).reshape(num_layers, -1)
    at = {node: c for c, node in enumerate(node_C)}
    way_WN = np.array([[at[node] for node in way] for way in _ways(tuple(range(num_groups)), each)])
    busiest_LW = least_LC[:, way_WN].max(axis=2)
    return Deal(np.array(node_C)[way_WN[busiest_LW.argmin(axis=1)]], busiest_LW.min(axis=1))


def _group_loads(loads: NDArray[np.float64], num_groups: int) -> NDArray[np.float64]:
    return np.asarray(loads.reshape(len(loads), num_groups, -1).sum(axis=2))


def _ways(groups: tuple[int, ...], each: int) -> Iterator[list[tuple[int, ...]]]:
    """The ways to deal groups to nodes alike, so many to each."""
    if not groups:
        yield []
    for others in combinations(groups[1:], each - 1) if groups else ():
        node = (groups[0], *others)
        yield from ([node, *rest] for rest in _ways(tuple(q for q in groups if q not in node), each))
