"""The transportation problem by successive shortest paths between the sinks, of two by a partial sort; compiled.

Every item starts on its cheapest sink; then one item after the other leaves an overfull sink along the cheapest chain
of moves, found in O(N^2). The cheapest item of every move u -> v is kept, and sought again among the items of u, I / N
of them, only when it leaves. To be imported in the call that needs it.

Legend: I items; N sinks.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import Bools, Ints
from .compiled import compiled

Costs = NDArray[Any]  # int64 or float64


class _Sinks(NamedTuple):
    """Sinks of items, and the cheapest item of every move u -> v.

    `members[base[u] : base[u] + load[u]]` are on u, item i at `base[u] + place[i]`. `first[u, v]` is the item that goes
    from u to v at least cost `step[u, v]`, among equals the latest; -1: none. The last four are the search's own.
    """

    cost: Costs
    sink: Ints
    load: Ints
    base: Ints
    members: Ints
    place: Ints
    first: Ints
    step: Costs
    distance: Costs
    parent: Ints
    reached: Bools
    done: Bools


@compiled
def transport(cost: Costs, capacity: Ints) -> Ints:
    """The sink of every item `[I]` at the least cost; costs `[I, N]` whose sums of 2 N do not overflow."""
    num_items, num_sinks = cost.shape
    sink, load = np.empty(num_items, np.int64), np.zeros(num_sinks, np.int64)
    for i in range(num_items):
        best = 0
        for n in range(1, num_sinks):
            if cost[i, n] < cost[i, best]:
                best = n
        sink[i] = best
        load[best] += 1
    excess = np.maximum(load - capacity, 0).sum()
    if excess == 0:
        return sink
    most = load + np.minimum(np.maximum(capacity - load, 0), excess)
    base, members, place = np.cumsum(most) - most, np.empty(most.sum(), np.int64), np.empty_like(sink)
    first, step = np.full((num_sinks, num_sinks), -1), np.zeros((num_sinks, num_sinks), cost.dtype)
    price, distance = np.zeros(num_sinks, cost.dtype), np.zeros(num_sinks, cost.dtype)
    parent = np.zeros_like(load)
    flags = np.zeros((2, num_sinks), np.bool_)
    load[:] = 0
    sinks = _Sinks(cost, sink, load, base, members, place, first, step, distance, parent, flags[0], flags[1])
    for i in range(num_items):
        _enter(sinks, i, sink[i])
    for _ in range(excess):
        _relieve(sinks, capacity, price)
    return sink


@compiled
def _relieve(sinks: _Sinks, capacity: Ints, price: Costs) -> None:
    """One item less on the overfull sinks, one more on a sink that had room, along the cheapest chain of moves."""
    end = _search(sinks, capacity, price)
    for n in range(len(price)):
        if sinks.done[n]:
            price[n] += sinks.distance[end] - sinks.distance[n]
    while sinks.parent[end] >= 0:
        i = sinks.first[sinks.parent[end], end]
        _leave(sinks, i)
        _enter(sinks, i, end)
        end = sinks.parent[end]


@compiled
def _search(sinks: _Sinks, capacity: Ints, price: Costs) -> int:
    """The sink with room that is nearest to the overfull ones (Dijkstra).

    With the prices, no move costs less than nothing: cost[i, v] - cost[i, u] + price[v] - price[u] >= 0 for i on u.
    """
    num_sinks = len(price)
    for n in range(num_sinks):
        sinks.distance[n], sinks.parent[n] = 0, -1
        sinks.reached[n], sinks.done[n] = sinks.load[n] > capacity[n], False
    while True:
        u = -1
        for n in range(num_sinks):
            if sinks.reached[n] and not sinks.done[n] and (u < 0 or sinks.distance[n] < sinks.distance[u]):
                u = n
        if sinks.load[u] < capacity[u]:
            return u
        sinks.done[u] = True
        for v in range(num_sinks):
            if sinks.first[u, v] >= 0 and not sinks.done[v]:
                length = sinks.distance[u] + sinks.step[u, v] + price[v] - price[u]
                if not sinks.reached[v] or length < sinks.distance[v]:
                    sinks.reached[v], sinks.distance[v], sinks.parent[v] = True, length, u


@compiled
def _enter(sinks: _Sinks, i: int, u: int) -> None:
    cost, first, step = sinks.cost, sinks.first, sinks.step
    sinks.members[sinks.base[u] + sinks.load[u]], sinks.place[i] = i, sinks.load[u]
    sinks.sink[i] = u
    sinks.load[u] += 1
    for v in range(len(step)):
        own = cost[i, v] - cost[i, u]
        if first[u, v] < 0 or own < step[u, v] or (own == step[u, v] and i > first[u, v]):
            first[u, v], step[u, v] = i, own


@compiled
def _leave(sinks: _Sinks, i: int) -> None:
    cost, members, first = sinks.cost, sinks.members, sinks.first
    u = sinks.sink[i]
    sinks.load[u] -= 1
    start, end = sinks.base[u], sinks.base[u] + sinks.load[u]
    members[start + sinks.place[i]] = members[end]
    sinks.place[members[end]] = sinks.place[i]
    for v in range(len(first)):
        if first[u, v] == i:
            best, least = -1, 0
            for k in range(start, end):
                j = members[k]
                own = cost[j, v] - cost[j, u]
                if best < 0 or own < least or (own == least and j > best):
                    best, least = j, own
            first[u, v], sinks.step[u, v] = best, least


@compiled
def two_sinks(cost: Costs, capacity: Ints) -> Ints:
    """The sink, 0 or 1, of every item `[I]` at the least cost.

    Parameters
    ----------
    cost
        `[I, 2]`, differences that do not overflow.
    capacity
        The most items a sink takes, `[2]`, enough.

    Notes
    -----
    The items for which sink 1 is the greatest gain go there: all that gain, within the capacities, and of the last one
    and its equals the latest.
    """
    left = len(cost)
    dearer, sink, gains = np.empty(left, cost.dtype), np.zeros(left, np.int64), 0
    for i in range(left):
        dearer[i] = cost[i, 1] - cost[i, 0]
        gains += dearer[i] < 0
    moved = min(max(gains, left - capacity[0]), capacity[1])
    if moved == 0:
        return sink
    last = _selected(dearer.copy(), moved - 1)
    for i in range(left):
        sink[i] = dearer[i] < last
        moved -= sink[i]
    while moved:
        left -= 1
        if dearer[left] == last:
            sink[left] = 1
            moved -= 1
    return sink


@compiled
def _selected(values: Costs, place: int) -> Any:
    """Value at this place in sorted order, by Hoare's quickselect. The values are rearranged."""
    low, high = 0, len(values) - 1
    while low < high:
        middle, i, j = values[low + (high - low) * 5 // 8], low, high
        while i <= j:
            while values[i] < middle:
                i += 1
            while values[j] > middle:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if j < place < i:
            break
        low, high = (low, j) if place <= j else (i, high)
    return values[place]
