"""The shares of least traffic under a load: a minimum-cost flow by successive shortest paths; compiled.

Legend: E experts; P slots; C cells; D devices; A arcs.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Bools, Ints
from ..compiled import compiled, inlined
from .holders import FAR, Holders
from .loads import pour

NOWHERE = np.int64(2**61)  # label of a node that no chain leaves


class _Flow(NamedTuple):
    """Pairs of the items, which are slots and then cells, `[P + C]`, and what one more or less costs by arc, `[A]`."""

    value: Ints
    free: Ints  #: Pairs that an item serves at no price
    price: Ints  #: Of each pair beyond these
    cost: Ints
    back: Ints  #: Costs of the arcs the other way
    room: Ints  #: How many pairs go at that cost


@compiled
def nearest(pairs: Ints, total: Ints, holders: Holders, most: int, ratio: int) -> Ints:
    """Pairs by slot `[P]` at the least traffic, no device more than `most`, which must be enough."""
    served, load, free = _unlimited(pairs, total, holders)
    flow = _flow(served, free, holders, ratio - 1)
    size = len(holders.start) - 1
    label, queue, waiting = np.empty(size, np.int64), np.empty(size, np.int64), np.zeros(size, np.bool_)
    after, path, spent = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.bool_)
    while load.max() > most:
        _label(load, most, holders, flow.back, label, queue, waiting)
        cheapest = NOWHERE
        for d in range(len(load)):
            if load[d] > most:
                cheapest = min(cheapest, label[d])
        if cheapest == NOWHERE:
            raise ValueError("the holders cannot keep to this limit")
        after[:], spent[:] = holders.start[:-1], False
        for source in range(len(load)):
            if load[source] > most and label[source] == cheapest and not spent[source]:
                _leave(source, load, most, holders, flow, label, after, path, spent)
    return flow.value[: len(served)]


@inlined
def _unlimited(pairs: Ints, total: Ints, holders: Holders) -> tuple[Ints, Ints, Ints]:
    """Pairs by slot and by device where devices have no limit: own device, then own node, then anywhere.

    Then the pairs from a slot's own device and from a cell's own node, `[P + C]`.
    """
    first, device, cell_first, node = holders.first, holders.device, holders.cell_first, holders.node
    expert_first, group, num_slots = holders.expert_first, holders.devices_per_node, len(holders.device)
    served, load = np.zeros(num_slots, np.int64), np.zeros(pairs.shape[1], np.int64)
    free, order = np.zeros(num_slots + len(node), np.int64), np.empty(len(load), np.int64)
    for e in range(len(total)):
        if first[e + 1] - first[e] == 1:
            served[first[e]] = total[e]
            load[device[first[e]]] += total[e]
            continue
        for p in range(first[e], first[e + 1]):
            served[p] = free[p] = pairs[e, device[p]]
            load[device[p]] += served[p]
        for c in range(expert_first[e], expert_first[e + 1]):
            for g in range(node[c] * group, (node[c] + 1) * group):
                free[num_slots + c] += pairs[e, g]
    for c in range(len(node)):
        e = holders.expert[cell_first[c]]
        if first[e + 1] - first[e] > 1:
            rest = free[num_slots + c]
            for p in range(cell_first[c], cell_first[c + 1]):
                rest -= served[p]
            pour(rest, cell_first[c], cell_first[c + 1], served, load, device, order)
    for e in range(len(total)):
        if first[e + 1] - first[e] > 1:
            rest = total[e]
            for p in range(first[e], first[e + 1]):
                rest -= served[p]
            pour(rest, first[e], first[e + 1], served, load, device, order)
    return served, load, free


@inlined
def _flow(served: Ints, free: Ints, holders: Holders, far: int) -> _Flow:
    """The flow of what slots serve, `[P]`; a pair that comes from another node costs `far` more than one inside."""
    num_slots, arcs = len(served), len(holders.end)
    value, price = np.zeros(len(free), np.int64), np.ones(len(free), np.int64)
    price[num_slots:] = far
    for p in range(num_slots):
        value[p] = served[p]
        value[num_slots + holders.cell[p]] += served[p]
    cost, back, room = np.empty(arcs, np.int64), np.empty(arcs, np.int64), np.empty(arcs, np.int64)
    flow = _Flow(value, free, price, cost, back, room)
    for i in range(len(value)):
        if holders.less[i] >= 0:
            _price(i, holders, flow)
    return flow


@inlined
def _label(load: Ints, most: int, holders: Holders, back: Ints, label: Ints, queue: Ints, waiting: Bools) -> None:
    """Label every node with what the cheapest chain to a device with room costs, so that searches meet few dead ends.

    `queue` and `waiting` are scratch; none wait before or after.
    """
    start, end, size = holders.start, holders.end, len(label)
    label[:], head, count = NOWHERE, 0, 0
    for d in range(len(load)):
        if load[d] < most:
            label[d], waiting[d], queue[count] = 0, True, d
            count += 1
    while count > 0:
        v = queue[head]
        head, count = head + 1 if head + 1 < size else 0, count - 1
        waiting[v] = False
        for a in range(start[v], start[v + 1]):
            u, new = end[a], label[v] + back[a]
            if new < label[u]:
                label[u] = new
                if not waiting[u]:
                    at = head + count
                    waiting[u], queue[at if at < size else at - size] = True, u
                    count += 1


@inlined
def _leave(
    source: int,
    load: Ints,
    most: int,
    holders: Holders,
    flow: _Flow,
    label: Ints,
    after: Ints,
    path: Ints,
    spent: Bools,
) -> None:
    """Let pairs over the limit leave a device along chains that cost what its label says, until none is left.

    `after` is the arc that a node tries next, `spent` whether it is on the path or leads nowhere; `path` is scratch.
    """
    start, end, item, more = holders.start, holders.end, holders.item, holders.more
    value, cost, room = flow.value, flow.cost, flow.room
    depth, u = 0, source
    path[0], spent[source] = source, True
    while depth >= 0:
        if u < len(load) and load[u] < most:
            amount = min(load[source] - most, most - load[u])
            for i in range(depth):
                amount = min(amount, room[after[path[i]]])
            load[source] -= amount
            load[u] += amount
            kept = depth  # the path goes on from its first arc that costs another price now
            for i in range(depth - 1, -1, -1):
                a = after[path[i]]
                j, before = item[a], cost[a]
                value[j] += amount if a == more[j] else -amount
                _price(j, holders, flow)
                if cost[a] != before:
                    kept = i
            if load[source] == most:
                kept = -1
            for i in range(kept + 1, depth + 1):
                spent[path[i]] = False
            depth, u = kept, path[max(kept, 0)]
            continue
        a = after[u]
        while a < start[u + 1] and (label[u] != cost[a] + label[end[a]] or spent[end[a]]):
            a += 1
        after[u] = a
        if a < start[u + 1]:
            depth, u = depth + 1, end[a]
            path[depth], spent[u] = u, True
        else:  # a dead end
            depth -= 1
            u = path[max(depth, 0)]
            after[u] += 1


@inlined
def _price(i: int, holders: Holders, flow: _Flow) -> None:
    """Set what a pair less and a pair more of an item cost, and how many go so; what has no room costs `FAR`."""
    value, free, price, less, more = flow.value[i], flow.free[i], flow.price[i], holders.less[i], holders.more[i]
    cost, back, room = flow.cost, flow.back, flow.room
    if value > free:
        cost[less], room[less], cost[more], room[more] = -price, value - free, price, FAR
    else:
        cost[less], room[less] = 0 if value > 0 else FAR, value
        cost[more], room[more] = (0, free - value) if value < free else (price, FAR)
    back[less], back[more] = cost[more], cost[less]
