"""Exchanges of items between sinks: those that cost nothing decide ties, those that gain are made until none is left.

Ties fall the same way whatever solved them: the first in lexicographic order. The items are taken in order, and each
goes to the lowest sink that it has in any optimal assignment which agrees on the items before it. Compiled.

Legend: I items; N sinks. Node N of the exchange graph stands for unused capacity.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints
from .compiled import compiled

__all__ = ["cancel_cycles", "first_of_ties", "prices"]

ROUNDING = 8 * np.finfo(np.float64).eps


@compiled
def first_of_ties(cost: Ints, capacity: Ints, sink: Ints) -> tuple[Ints, bool]:
    """The optimal assignment `[I]` that comes first, from any optimal one, and whether that was one; integer costs.

    Notes
    -----
    With optimal prices, an exchange costs nothing if and only if each of its moves is tight: it costs the item nothing
    at these prices. `many[u, v]` counts the tight moves u -> v of the items not yet decided.
    """
    price, settled = prices(cost, capacity, sink, 0)
    first, room = sink.copy(), capacity.copy()
    if not settled:
        return first, False
    many = np.zeros((len(price), len(price)), np.int64)
    loose = np.empty_like(sink)
    num_loose = 0
    for i in range(len(sink)):
        room[sink[i]] -= 1
        if _count(many, cost, price, first, i, 1):
            loose[num_loose] = i
            num_loose += 1
    for k in range(num_loose):
        i, u = loose[k], first[loose[k]]
        _count(many, cost, price, first, i, -1)
        for v in range(u):
            if cost[i, v] + price[v] == cost[i, u] + price[u] and _make_way(
                many, cost, price, first, room, loose[k:num_loose], v
            ):
                break
    return first, True


@compiled
def prices(cost: NDArray[Any], capacity: Ints, sink: Ints, rounding: float) -> tuple[NDArray[Any], bool]:
    """Optimal prices of the sinks `[N]`, at least 0 and 0 where room is left, and whether there are any.

    There are, if and only if no other assignment is cheaper by more than `rounding` an exchange (Bellman-Ford).
    """
    num_items, num_sinks = cost.shape
    room, move = capacity.copy(), np.zeros((num_sinks, num_sinks), cost.dtype)
    filled = np.zeros(num_sinks, np.bool_)
    for i in range(num_items):
        u = sink[i]
        for v in range(num_sinks):
            if not filled[u] or cost[i, v] - cost[i, u] < move[u, v]:
                move[u, v] = cost[i, v] - cost[i, u]
        filled[u] = True
        room[u] -= 1
    price = np.zeros(num_sinks, cost.dtype)
    for _ in range(num_sinks + 2):
        settled, least = True, price.min()
        for u in range(num_sinks):
            if room[u] > 0 and least < price[u] - rounding:
                price[u], settled = least, False
            for v in range(num_sinks):
                if filled[u] and price[v] + move[u, v] < price[u] - rounding:
                    price[u], settled = price[v] + move[u, v], False
        if settled:
            break
    return price - price.min(), settled


@compiled
def _count(many: Ints, cost: Ints, price: Ints, sink: Ints, i: int, times: int) -> bool:
    """Whether item i has tight moves; they are counted so many times."""
    u, found = sink[i], False
    own = cost[i, u] + price[u]
    for v in range(len(price)):
        if v != u and cost[i, v] + price[v] == own:
            many[u, v] += times
            found = True
    return found


@compiled
def _make_way(many: Ints, cost: Ints, price: Ints, sink: Ints, room: Ints, loose: Ints, v: int) -> bool:
    """Whether the first loose item can move to v, the others making way by tight moves; if so, they do.

    Free room, which costs nothing wherever it is, passes from a sink to any other without a price.
    """
    goal, num_sinks = sink[loose[0]], len(price)
    parent, by_room, queue = np.full(num_sinks, -1), np.zeros(num_sinks, np.bool_), np.full(num_sinks, v)
    parent[v], head, tail = v, 0, 1
    while head < tail and parent[goal] < 0:
        u = queue[head]
        head += 1
        for n in range(num_sinks):
            if parent[n] < 0 and (many[u, n] > 0 or (room[u] > 0 and price[n] == 0)):
                parent[n], by_room[n], queue[tail] = u, many[u, n] == 0, n
                tail += 1
    if parent[goal] < 0:
        return False
    while goal != v:
        u = parent[goal]
        if by_room[goal]:
            room[u] -= 1
            room[goal] += 1
        else:
            _move_one(many, cost, price, sink, loose, u, goal)
        goal = u
    sink[loose[0]] = v
    return True


@compiled
def _move_one(many: Ints, cost: Ints, price: Ints, sink: Ints, loose: Ints, u: int, v: int) -> None:
    """Move the last loose item, other than the first, whose move u -> v is tight."""
    for i in loose[:0:-1]:
        if sink[i] == u and cost[i, u] + price[u] == cost[i, v] + price[v]:
            _count(many, cost, price, sink, i, -1)
            sink[i] = v
            _count(many, cost, price, sink, i, 1)
            break


def cancel_cycles(cost: Floats, capacity: Ints, sink: Ints) -> Ints:
    """An assignment of items to sinks `[I]` that is optimal up to rounding, from a feasible one near it.

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
    while (moves := _negative_cycle(*_graph(cost, capacity, sink_I))) is not None:
        items, targets = np.array(moves).T
        change = np.concatenate([cost[items, targets], -cost[items, sink_I[items]]])
        if math.fsum(change.tolist()) >= 0:
            break  # negative only by rounding
        sink_I[items] = targets
    return sink_I


def _graph(cost_IN: Floats, capacity_N: Ints, sink_I: Ints) -> tuple[Floats, Ints, float]:
    """Arc costs `[N+1, N+1]`, the item that each arc moves (-1: none), and the rounding of a cycle's cost."""
    num_sinks = cost_IN.shape[1]
    arc = np.full((num_sinks + 1, num_sinks + 1), np.inf)
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
    return arc, item, ROUNDING * float(np.abs(chosen_I).max())


def _negative_cycle(arc: Floats, item: Ints, rounding: float) -> list[tuple[int, int]] | None:
    """The moves (item, new sink) of a cycle that costs less than nothing, None when there is none (Bellman-Ford)."""
    num_nodes = len(arc)
    distance, parent = np.zeros(num_nodes), np.full(num_nodes, -1)
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


def _cycle(parent: Ints) -> list[tuple[int, int]] | None:
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
