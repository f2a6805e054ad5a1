"""The shares of least traffic under a load: a minimum-cost flow by successive shortest paths; compiled.

Legend: E experts; P slots; C cells; D devices.
"""

import numpy as np

from ..arrays import Ints
from ..compiled import compiled, inlined
from .holders import FAR, Holders
from .loads import pour

NOWHERE = np.int64(2**61)  # label of a node that no chain leaves


@compiled
def nearest(pairs: Ints, total: Ints, holders: Holders, most: int, ratio: int) -> Ints:
    """Pairs by slot `[P]` at the least traffic, no device more than `most`, which must be enough."""
    first, device, cell, node = holders.first, holders.device, holders.cell, holders.node
    cell_first, expert_first, group = holders.cell_first, holders.expert_first, holders.devices_per_node
    num_experts, num_devices, num_cells = len(total), pairs.shape[1], len(node)
    far = ratio - 1
    served, load = np.zeros(len(device), np.int64), np.zeros(num_devices, np.int64)
    here, inside = np.empty(len(device), np.int64), np.zeros(num_cells, np.int64)
    order = np.empty(num_devices, np.int64)
    # Without limits: own device, then own node, then anywhere.
    for e in range(num_experts):
        for p in range(first[e], first[e + 1]):
            here[p] = pairs[e, device[p]]
            served[p] = here[p] if first[e + 1] - first[e] > 1 else total[e]
            load[device[p]] += served[p]
        for c in range(expert_first[e], expert_first[e + 1]):
            for g in range(node[c] * group, (node[c] + 1) * group):
                inside[c] += pairs[e, g]
    for c in range(num_cells):
        e = holders.expert[cell_first[c]]
        if first[e + 1] - first[e] > 1:
            rest = inside[c]
            for p in range(cell_first[c], cell_first[c + 1]):
                rest -= served[p]
            pour(rest, cell_first[c], cell_first[c + 1], served, load, device, order)
    for e in range(num_experts):
        if first[e + 1] - first[e] > 1:
            rest = total[e]
            for p in range(first[e], first[e + 1]):
                rest -= served[p]
            pour(rest, first[e], first[e + 1], served, load, device, order)
    # What is over the limit leaves along the cheapest chains of moves.
    num_slots = len(device)
    value, free = np.zeros(num_slots + num_cells, np.int64), np.concatenate((here, inside))
    for p in range(num_slots):
        value[p] = served[p]
        value[num_slots + cell[p]] += served[p]
    start, end, item, less, more = holders.start, holders.end, holders.item, holders.less, holders.more
    cost, back, room = np.empty(len(end), np.int64), np.empty(len(end), np.int64), np.empty(len(end), np.int64)
    for i in range(len(value)):
        if less[i] >= 0:
            _price(value[i], free[i], 1 if i < num_slots else far, less[i], more[i], cost, back, room)
    size = len(start) - 1
    label, waiting, queue = np.empty(size, np.int64), np.zeros(size, np.bool_), np.empty(size, np.int64)
    after, spent, path = np.empty(size, np.int64), np.empty(size, np.bool_), np.empty(size, np.int64)
    while True:
        # Labels: what the cheapest chain costs to a device with room, so that the search below meets few dead ends.
        label[:] = NOWHERE
        head, count, over = 0, 0, False
        for d in range(num_devices):
            over |= load[d] > most
            if load[d] < most:
                label[d], waiting[d], queue[count] = 0, True, d
                count += 1
        if not over:
            return value[:num_slots]
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
        cheapest = NOWHERE
        for d in range(num_devices):
            if load[d] > most:
                cheapest = min(cheapest, label[d])
        if cheapest == NOWHERE:
            raise ValueError("the holders cannot keep to this limit")
        after[:], spent[:] = start[:-1], False
        for source in range(num_devices):
            while load[source] > most and label[source] == cheapest and not spent[source]:
                depth, u = 0, source
                path[0], spent[source] = source, True
                while depth >= 0 and not (u < num_devices and load[u] < most):
                    a = after[u]
                    while a < start[u + 1]:
                        if label[u] == cost[a] + label[end[a]] and not spent[end[a]]:
                            break
                        a += 1
                    after[u] = a
                    if a < start[u + 1]:
                        depth, u = depth + 1, end[a]
                        path[depth], spent[u] = u, True
                    else:  # a dead end
                        depth -= 1
                        u = path[max(depth, 0)]
                        after[u] += 1
                if depth < 0:
                    break
                amount = min(load[source] - most, most - load[u])
                for i in range(depth):
                    amount = min(amount, room[after[path[i]]])
                load[source] -= amount
                load[u] += amount
                spent[u] = False
                for i in range(depth):
                    spent[path[i]] = False
                    a = after[path[i]]
                    j = item[a]
                    value[j] += amount if a == more[j] else -amount
                    _price(value[j], free[j], 1 if j < num_slots else far, less[j], more[j], cost, back, room)


@inlined
def _price(value: int, free: int, price: int, less: int, more: int, cost: Ints, back: Ints, room: Ints) -> None:
    """Costs of a pair less and a pair more for an item that serves `free` pairs at no price, and how many go so.

    `back` are the costs of the arcs the other way; what has no room costs `FAR`.
    """
    if value > free:
        cost[less], room[less], cost[more], room[more] = -price, value - free, price, FAR
    else:
        cost[less], room[less] = 0 if value > 0 else FAR, value
        cost[more], room[more] = (0, free - value) if value < free else (price, FAR)
    back[less], back[more] = cost[more], cost[less]
