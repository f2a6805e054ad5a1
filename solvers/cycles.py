"""Negative cycles of an assignment, cancelled until none is left: then no other assignment is cheaper.

Legend: I items; N sinks. Node N of the exchange graph stands for unused capacity.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["cancel_cycles"]

ROUNDING = 8 * np.finfo(np.float64).eps


def cancel_cycles(cost: NDArray[Any], capacity: NDArray[np.int64], sink: NDArray[np.int64]) -> NDArray[np.int64]:
    """An optimal assignment of items to sinks `[I]`, from a feasible one: exact for integers, else up to rounding.

    Parameters
    ----------
    cost
        `[I, N]`.
    capacity
        The most items a sink takes, `[N]`.
    sink
        A feasible assignment `[I]`.

    Notes
    -----
    Moving the cheapest item from sink u to sink v costs `w[u, v] = min_{i on u} cost[i, v] - cost[i, u]`. An
    assignment is optimal if and only if this graph, with arcs from sinks that have room to node N and from N to
    all, has no negative cycle (Klein 1967). Starting near the optimum, few cycles are left.
    """
    sink_I = sink.copy()
    while (moves := _negative_cycle(*_exchange(cost, capacity, sink_I))) is not None:
        items, targets = np.array(moves).T
        change = np.concatenate([cost[items, targets], -cost[items, sink_I[items]]])
        if change.dtype.kind == "f" and math.fsum(change.tolist()) >= 0:
            break  # negative only by rounding
        sink_I[items] = targets
    return sink_I


def _exchange(
    cost_IN: NDArray[Any], capacity_N: NDArray[np.int64], sink_I: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64], float]:
    """Arc costs `[N+1, N+1]`, the item that each arc moves (-1: none), and the rounding of a cycle's cost.

    Integers become Python's, which infinity goes with.
    """
    num_sinks, whole = cost_IN.shape[1], cost_IN.dtype.kind != "f"
    arc = np.full((num_sinks + 1, num_sinks + 1), np.inf, dtype=object if whole else np.float64)
    item = np.full(arc.shape, -1)
    chosen_I = cost_IN[np.arange(len(sink_I)), sink_I]
    for u in range(num_sinks):
        if len(on_u := np.flatnonzero(sink_I == u)):
            move_uN = cost_IN[on_u] - chosen_I[on_u, None]
            best_N = move_uN.argmin(axis=0)
            arc[u, :-1], item[u, :-1] = move_uN[best_N, np.arange(num_sinks)], on_u[best_N]
    arc[:-1, -1][np.bincount(sink_I, minlength=num_sinks) < capacity_N] = 0
    arc[-1, :-1] = 0
    np.fill_diagonal(arc, np.inf)
    return arc, item, 0 if whole else ROUNDING * float(np.abs(chosen_I).max())


def _negative_cycle(arc: NDArray[Any], item: NDArray[np.int64], rounding: float) -> list[tuple[int, int]] | None:
    """The moves (item, new sink) of a cycle that costs less than nothing, None when there is none (Bellman-Ford)."""
    num_nodes = len(arc)
    distance, parent = np.zeros(num_nodes, arc.dtype), np.full(num_nodes, -1)
    for _ in range(num_nodes):
        through = distance[:, None] + arc
        best = through.argmin(axis=0)
        shorter = through[best, np.arange(num_nodes)] < distance - rounding
        if not shorter.any():
            return None
        distance = np.where(shorter, through[best, np.arange(num_nodes)], distance)
        parent = np.where(shorter, best, parent)
        if (cycle := _cycle(parent)) is not None:
            return [(int(item[u, v]), v) for u, v in cycle if item[u, v] >= 0]
    return None


def _cycle(parent: NDArray[np.int64]) -> list[tuple[int, int]] | None:
    """The arcs of a cycle among the parents, None when they form a forest."""
    colour = np.zeros(len(parent), dtype=np.int64)
    for start in range(len(parent)):
        node = start
        while node >= 0 and not colour[node]:
            colour[node] = start + 1
            node = int(parent[node])
        if node >= 0 and colour[node] == start + 1:
            arcs = [(int(parent[node]), node)]
            while arcs[-1][0] != node:
                arcs.append((int(parent[arcs[-1][0]]), arcs[-1][0]))
            return arcs
    return None
