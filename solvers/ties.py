"""Ties among optimal assignments, broken the same way whatever solved them: the first in lexicographic order.

The items are taken in order, and each goes to the lowest sink that it has in any optimal assignment which agrees on
the items before it. Compiled.

Legend: I items; N sinks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled

__all__ = ["first_of_ties", "prices"]

Ints = NDArray[np.int64]


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
            if cost[i, v] + price[v] == cost[i, u] + price[u] and _exchange(
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
def _exchange(many: Ints, cost: Ints, price: Ints, sink: Ints, room: Ints, loose: Ints, v: int) -> bool:
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
