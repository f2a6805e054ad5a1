"""The exact split of a step: how many of each source's tokens go to each replica, so that no device holds more than it
must, and then so that the least of them travel; compiled.

Of one layer in one step, let I[e, g] be the token-expert pairs of expert e on source g, and x[p] what slot p serves:
integers with sum over the slots of e of x[p] = I_e. First `least` finds

    lam = min over x of max over devices of load[d] = max over sets A of experts of ceil(I(A) / |N(A)|),

N(A) the devices that hold one of A: a maximum flow, whose violated cut raises lam until there is none. Then `nearest`
finds, among all x with load[d] <= lam, one of the least traffic. On nodes of devices the cheapest way to serve x costs

    sum over slots of (x[p] - I[e, d])+  +  (ratio - 1) x sum over cells of (x[e, n] - I[e, n])+

pairs, a cell being an expert on a node: a minimum-cost flow with an arc a slot, solved by successive shortest paths.
Both are integers alone, so that every rank finds the same. To be imported in the call that needs it.

Legend: E experts; P slots; C cells; D devices; N nodes. Slots here are in the order of their experts, then devices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import Bools, Ints
from .compiled import compiled, inlined

FAR = np.int64(2**62)
NOWHERE = np.int64(2**61)  # label of a node that no chain leaves


class Holders(NamedTuple):
    """Holders of the experts of a layer.

    The slots of expert e are `first[e] : first[e + 1]`, those of cell c `cell_first[c] : cell_first[c + 1]`, its cells
    `expert_first[e] : expert_first[e + 1]`; device d holds the slots `held[held_first[d] : held_first[d + 1]]`.
    """

    first: Ints
    device: Ints
    expert: Ints
    cell: Ints
    cell_first: Ints
    expert_first: Ints
    held: Ints
    held_first: Ints
    node: Ints  #: Of a cell
    devices_per_node: int
    column: Ints  #: A slot's column in the placement's row
    start: Ints
    end: Ints
    item: Ints
    less: Ints
    more: Ints


def holders_of(experts: NDArray[np.integer], slots: NDArray[np.integer], num_experts: int, group: int) -> Holders:
    """Holders, for the expert in every slot `[P]` of devices with these many slots `[D]`, `group` a node."""
    starts = np.concatenate([[0], np.cumsum(slots)]).astype(np.int64)
    found: Holders = in_cells(slots_of(experts.astype(np.int64), starts, num_experts), group)
    return found


@compiled
def slots_of(experts: Ints, starts: Ints, num_experts: int) -> Holders:
    """Holders as far as `least` and `relieve` ask: without the cells and arcs of `in_cells`.

    Parameters
    ----------
    experts
        In every column of the placement's row, -1 where there is none.
    starts
        The first column of each device, with the end, `[D + 1]`.
    """
    num_devices = len(starts) - 1
    first, held_first = np.zeros(num_experts + 1, np.int64), np.zeros(num_devices + 1, np.int64)
    for d in range(num_devices):
        held_first[d + 1] = held_first[d]
        for i in range(starts[d], starts[d + 1]):
            if experts[i] >= 0:
                first[experts[i] + 1] += 1
                held_first[d + 1] += 1
    for e in range(num_experts):
        first[e + 1] += first[e]
    num_slots = first[num_experts]
    device, expert = np.empty(num_slots, np.int64), np.empty(num_slots, np.int64)
    column, held = np.empty(num_slots, np.int64), np.empty(num_slots, np.int64)
    at, place, none = first[:-1].copy(), held_first[:-1].copy(), np.empty(0, np.int64)
    for d in range(num_devices):
        for i in range(starts[d], starts[d + 1]):
            e = experts[i]
            if e >= 0:
                p = at[e]
                device[p], expert[p], column[p] = d, e, i
                at[e] += 1
    for p in range(num_slots):
        held[place[device[p]]] = p
        place[device[p]] += 1
    return Holders(
        first, device, expert, none, none, none, held, held_first, none, 1, column, none, none, none, none, none
    )


@compiled
def in_cells(slots: Holders, group: int) -> Holders:
    """Holders with the cells on nodes of `group` devices, and the arcs of the flow over them."""
    first, device, expert = slots.first, slots.device, slots.expert
    num_experts, num_devices, num_slots = len(first) - 1, len(slots.held_first) - 1, len(device)
    # Cells: an expert's slots on a node follow one another.
    cell, node = np.empty(num_slots, np.int64), np.empty(num_slots, np.int64)
    cell_first, expert_first = np.empty(num_slots + 1, np.int64), np.zeros(num_experts + 1, np.int64)
    cells = 0
    for e in range(num_experts):
        expert_first[e] = cells
        for p in range(first[e], first[e + 1]):
            if p == first[e] or device[p] // group != node[cells - 1]:
                node[cells], cell_first[cells] = device[p] // group, p
                cells += 1
            cell[p] = cells - 1
    expert_first[num_experts], cell_first[cells] = cells, num_slots
    # Arcs of the flow, by the node that they leave: from device to cell or cell to expert, then back.
    experts_at, items = num_devices + cells, num_slots + cells
    lower, upper = np.empty(items, np.int64), np.empty(items, np.int64)
    start = np.zeros(experts_at + num_experts + 1, np.int64)
    for i in range(items):
        p = i if i < num_slots else cell_first[i - num_slots]
        lower[i] = device[p] if i < num_slots else num_devices + i - num_slots
        upper[i] = num_devices + cell[p] if i < num_slots else experts_at + expert[p]
        if first[expert[p] + 1] - first[expert[p]] == 1:
            lower[i] = -1
            continue
        start[lower[i] + 1] += 1
        start[upper[i] + 1] += 1
    for i in range(len(start) - 1):
        start[i + 1] += start[i]
    end, item = np.empty(start[-1], np.int64), np.empty(start[-1], np.int64)
    less, more, after = np.full(items, -1), np.full(items, -1), start[:-1].copy()
    for i in range(items):
        if lower[i] >= 0:
            a = after[lower[i]]
            less[i], end[a], item[a] = a, upper[i], i
            after[lower[i]] += 1
    for i in range(items):
        if lower[i] >= 0:
            a = after[upper[i]]
            more[i], end[a], item[a] = a, lower[i], i
            after[upper[i]] += 1
    return Holders(
        first,
        device,
        expert,
        cell,
        cell_first[: cells + 1],
        expert_first,
        slots.held,
        slots.held_first,
        node[:cells],
        group,
        slots.column,
        start,
        end,
        item,
        less,
        more,
    )


@compiled
def split(pairs: Ints, holders: Holders, ratio: int) -> tuple[Ints, int]:
    """Pairs by slot and source `[P, D]`, and the busiest device's load.

    Parameters
    ----------
    pairs
        `[E, D]`: token-expert pairs by expert and source.
    ratio
        What a pair that crosses nodes costs of one that crosses devices; 1: as much.

    Notes
    -----
    Of 32 experts on 16 devices it takes microseconds, of 256 on 64 some hundred.
    """
    total = pairs.sum(axis=1)
    most, _, _ = least(total, holders)
    served = nearest(pairs, total, holders, most, ratio)
    return deal(pairs, served, holders), most


@compiled
def least(total: Ints, holders: Holders) -> tuple[int, Bools, Ints]:
    """The least load of the busiest device, the devices that prove it, `[D]`, and loads that attain it, `[D]`.

    What the devices that prove it serve, nobody else can: all with slots, where the mean is the bound. `total` `[E]`
    are the pairs of each expert.
    """
    live = holders.held_first[1:] > holders.held_first[:-1]
    served, load = poured(total, holders)
    most, proof = -(-total.sum() // max(live.sum(), 1)), live
    while True:
        reached = relieve(served, load, holders, most)
        if not reached.any():
            return most, proof, load
        proof = reached  # nothing leaves these devices: they bound the load
        most = -(-load[proof].sum() // proof.sum())


@compiled
def poured(total: Ints, holders: Holders) -> tuple[Ints, Ints]:
    """Pairs by slot `[P]` and the loads `[D]` after each expert in turn has evened those of its devices."""
    first, device = holders.first, holders.device
    num_experts, num_devices = len(total), len(holders.held_first) - 1
    served, load = np.zeros(len(device), np.int64), np.zeros(num_devices, np.int64)
    order = np.empty(num_devices, np.int64)
    for e in range(num_experts):
        if first[e + 1] - first[e] == 1:
            served[first[e]] = total[e]
            load[device[first[e]]] += total[e]
    for _ in range(2):
        for e in range(num_experts):
            if first[e + 1] - first[e] > 1:
                for p in range(first[e], first[e + 1]):
                    load[device[p]] -= served[p]
                    served[p] = 0
                pour(total[e], first[e], first[e + 1], served, load, device, order)
    return served, load


@compiled
def relieve(served: Ints, load: Ints, holders: Holders, most: int) -> Bools:
    """Let the devices over `most` hand on what others have room for, a maximum flow, and the devices `[D]` in its way.

    What each slot serves and the loads change in place. None are in the way where all of it found room; else these
    hold `most` or more each, and nobody else can take anything that they serve.
    """
    first, device, held, held_first = holders.first, holders.device, holders.held, holders.held_first
    num_experts, num_devices = len(first) - 1, len(held_first) - 1
    if load.max() <= most:
        return np.zeros(num_devices, np.bool_)
    level_d, level_e = np.empty(num_devices, np.int64), np.empty(num_experts, np.int64)
    next_d, next_e = np.empty(num_devices, np.int64), np.empty(num_experts, np.int64)
    queue = np.empty(num_devices + num_experts, np.int64)
    leave, enter = np.empty(num_devices, np.int64), np.empty(num_devices, np.int64)
    while True:
        # Levels of a breadth-first search from the overfull devices, over what they serve, to devices with room.
        level_d[:], level_e[:], end, ends_at = -1, -1, 0, -1
        for d in range(num_devices):
            if load[d] > most:
                level_d[d], queue[end] = 0, d
                end += 1
        if end == 0:
            return level_d >= 0
        at = 0
        while at < end:
            d = queue[at]
            at += 1
            if d < num_devices:
                if ends_at >= 0 and level_d[d] >= ends_at:
                    break
                for i in range(held_first[d], held_first[d + 1]):
                    e = holders.expert[held[i]]
                    if served[held[i]] > 0 and level_e[e] < 0 and first[e + 1] - first[e] > 1:
                        level_e[e], queue[end] = level_d[d] + 1, num_devices + e
                        end += 1
                continue
            e = d - num_devices
            for p in range(first[e], first[e + 1]):
                v = device[p]
                if level_d[v] < 0:
                    level_d[v], queue[end] = level_e[e] + 1, v
                    end += 1
                    if load[v] < most and ends_at < 0:
                        ends_at = level_d[v]
        if ends_at < 0:
            return level_d >= 0
        # Flows along the levels until none is left.
        next_d[:], next_e[:] = held_first[:-1], first[:-1]
        for source in range(num_devices):
            depth, d = 0, source
            while load[source] > most:
                if load[d] < most and level_d[d] == ends_at:
                    amount = min(load[source] - most, most - load[d])
                    for i in range(depth):
                        amount = min(amount, served[leave[i]])
                    for i in range(depth):
                        served[leave[i]] -= amount
                        served[enter[i]] += amount
                    load[source] -= amount
                    load[d] += amount
                    depth, d = 0, source
                    continue
                moved = False
                while next_d[d] < held_first[d + 1] and not moved:
                    p = held[next_d[d]]
                    e = holders.expert[p]
                    if served[p] > 0 and level_e[e] == level_d[d] + 1:
                        while next_e[e] < first[e + 1]:
                            q = next_e[e]
                            if level_d[device[q]] == level_e[e] + 1:
                                leave[depth], enter[depth] = p, q
                                depth, d, moved = depth + 1, device[q], True
                                break
                            next_e[e] += 1
                    if not moved:
                        next_d[d] += 1
                if moved:
                    continue
                if depth == 0:
                    break
                depth -= 1  # a dead end: the expert's next holder
                d = device[leave[depth]]
                next_e[holders.expert[enter[depth]]] += 1


@inlined
def pour(amount: int, start: int, end: int, served: Ints, load: Ints, device: Ints, order: Ints) -> None:
    """Add pairs to the slots `start : end` so that their devices' loads are as even as can be; `order` is scratch."""
    n = end - start
    for i in range(n):  # by load
        j = i
        while j > 0 and load[device[order[j - 1]]] > load[device[start + i]]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = start + i
    level, below, i = load[device[order[0]]], 0, 0
    while i < n:  # the level at which the first i + 1 hold the amount
        following = load[device[order[i + 1]]] if i + 1 < n else FAR
        if (following - level) * (i + 1) >= amount - below or i + 1 == n:
            break
        below += (following - level) * (i + 1)
        level = following
        i += 1
    rest = amount - below
    level, over = level + rest // (i + 1), rest % (i + 1)
    for j in range(i + 1):
        p = order[j]
        more = level + (1 if j < over else 0) - load[device[p]]
        served[p] += more
        load[device[p]] += more


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


@compiled
def deal(pairs: Ints, served: Ints, holders: Holders) -> Ints:
    """Pairs by slot and source `[P, D]`: own device first, own node next, then the others in order."""
    num_slots, num_devices = len(served), pairs.shape[1]
    first, device, group = holders.first, holders.device, holders.devices_per_node
    dealt = np.zeros((num_slots, num_devices), np.int64)
    left, room = np.empty(num_devices, np.int64), served.copy()
    for e in range(len(first) - 1):
        left[:] = pairs[e]
        for p in range(first[e], first[e + 1]):
            own = min(served[p], left[device[p]])
            dealt[p, device[p]] = own
            left[device[p]] -= own
            room[p] -= own
        for near in (True, False):
            g = 0
            for p in range(first[e], first[e + 1]):
                start = device[p] // group * group if near else g
                end = start + group if near else num_devices
                g = start
                while room[p] > 0 and g < end:
                    some = min(room[p], left[g])
                    dealt[p, g] += some
                    left[g] -= some
                    room[p] -= some
                    if room[p] > 0:
                        g += 1
    return dealt


@compiled
def in_turn(dealt: Ints, holders: Holders) -> tuple[Ints, NDArray[np.int32]]:
    """The devices that the pairs of each expert and source go to, one after the other, and where theirs begin `[E, D]`.

    The devices of an expert take turns, so that any part of a step is split alike: the i-th pair goes to the one that
    is furthest behind its share.
    """
    num_devices = dealt.shape[1]
    first = np.empty((len(holders.first) - 1, num_devices), np.int64)
    device = np.empty(dealt.sum(), np.int32)
    given, at = np.zeros(len(dealt), np.int64), 0
    for e in range(len(holders.first) - 1):
        start, end = holders.first[e], holders.first[e + 1]
        for g in range(num_devices):
            first[e, g], given[start:end] = at, 0
            n, done = dealt[start:end, g].sum(), 0
            for p in range(start, end):
                if dealt[p, g] == n:  # no other has a turn
                    device[at : at + n], done = holders.device[p], n
            at += done
            for i in range(done, n):
                best = furthest_behind(dealt[:, g], given, start, end, n, i + 1)
                given[best] += 1
                device[at] = holders.device[best]
                at += 1
    return first, device


@compiled
def furthest_behind(
    dealt: NDArray[np.integer], given: NDArray[np.integer], start: int, end: int, n: int, i: int
) -> int:
    """The slot, of `start : end`, that the i-th of n pairs goes to, by what each is `dealt` in all and was `given`."""
    best, most = start, -FAR
    for p in range(start, end):
        behind = dealt[p] * i - n * given[p]
        if behind > most:
            best, most = p, behind
    return best
