"""The placement of one layer while it is changed: who holds what, what moves, and what gradient sums send; compiled.

To be imported in the call that needs it.

Legend: E experts; D devices in nodes of G, S slots of each; P slots that hold an expert. A table `[D, S]` has the
expert in every slot, or -1 in an empty one.
"""

import numpy as np

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled
from ..quota import Holders, in_cells, slots_of
from .costs import Costs


@compiled
def slots_in(table: Ints, num_experts: int) -> Holders:
    """Holders in a table, as of `quota.slots_of`; `column` is the slot's place in the flat table."""
    num_devices, width = table.shape
    return slots_of(table.ravel(), np.arange(num_devices + 1) * width, num_experts)


@compiled
def holders_in(table: Ints, num_experts: int, group: int) -> Holders:
    """Holders in a table, with cells and arcs."""
    return in_cells(slots_in(table, num_experts), group)


@compiled
def holds(table: Ints, num_experts: int) -> Bools:
    """Mask of the experts on each device, `[D, E]`."""
    held = np.zeros((len(table), num_experts), np.bool_)
    for d in range(len(table)):
        for e in table[d]:
            if e >= 0:
                held[d, e] = True
    return held


@compiled
def sum_ports(holders: Holders) -> Floats:
    """Gradient rows that each device sends, and receives, inside its node (0) and between nodes (1), `[2, D]`."""
    first, device, cell, cell_first = holders.first, holders.device, holders.cell, holders.cell_first
    rows = np.zeros((2, len(holders.held_first) - 1))
    for e in range(len(first) - 1):
        n = first[e + 1] - first[e]
        if n > 1:
            for p in range(first[e], first[e + 1]):
                near = cell_first[cell[p] + 1] - cell_first[cell[p]]
                rows[0, device[p]] += 2.0 * (near - 1) / n
                rows[1, device[p]] += 2.0 * (n - near) / n
    return rows


@compiled
def sums_of(holders: Holders, home: Ints) -> Floats:
    """Gradient rows that leave (0) and reach (1) each device as replicas are summed at homes `[E]`, `[2, 2, 2, D]`.

    First (0) the n - 1 replicas of an expert send each other an (n - 1)-th of theirs, then (1) each sends what it added
    up to the home; by class of links inside nodes (0) and between them (1). Weights go the same ways backwards.
    """
    first, device, cell, cell_first = holders.first, holders.device, holders.cell, holders.cell_first
    rows = np.zeros((2, 2, 2, len(holders.held_first) - 1))
    for e in range(len(first) - 1):
        parts = first[e + 1] - first[e] - 1
        near_home = -1
        for p in range(first[e], first[e + 1]):
            if device[p] == home[e]:
                near_home = cell[p]
        for p in range(first[e], first[e + 1]):
            if device[p] != home[e]:
                at_home = cell[p] == near_home
                near = cell_first[cell[p] + 1] - cell_first[cell[p]] - 1 - at_home
                rows[0, 0, :, device[p]] += near / parts
                rows[0, 1, :, device[p]] += (parts - 1 - near) / parts
                link = 0 if at_home else 1
                rows[1, link, 0, device[p]] += 1 / parts
                rows[1, link, 1, home[e]] += 1 / parts
    return rows


@compiled
def homes_after(home: Ints, held: Bools, group: int) -> Ints:
    """The home of every expert `[E]`: where it was, while that device holds it; else on the same node, else anywhere.

    Of several devices, the one that is home to fewest.
    """
    num_devices, num_experts = held.shape
    kept, owned = home.copy(), np.zeros(num_devices, np.int64)
    for e in range(num_experts):
        if held[home[e], e]:
            owned[home[e]] += 1
    for e in range(num_experts):
        if not held[home[e], e]:
            best, least = -1, np.int64(2**62)
            for d in range(num_devices):
                far = num_experts + 1 if d // group != home[e] // group else 0
                if held[d, e] and owned[d] + far < least:
                    best, least = d, owned[d] + far
            kept[e] = best
            owned[best] += 1
    return kept


@compiled
def transfers(before: Bools, after: Bools, home: Ints, moved: Ints, costs: Costs, group: int) -> Ints:
    """Transfers by which a placement `[D, E]` becomes another: `[M, 3]`, rows of (expert, from, to).

    Homes go from `home` to `moved`; where replicas are not free, whatever a device holds newly comes from a holder: of
    its node where there is one, else the one that has sent least.
    """
    num_devices, num_experts = before.shape
    found, count = np.empty((num_devices * num_experts, 3), np.int64), 0
    sent = np.zeros(num_devices, np.int64)
    for e in range(num_experts):
        for d in range(num_devices):
            if costs.replicas_free:
                if moved[e] == d and home[e] != d:
                    found[count, 0], found[count, 1], found[count, 2] = e, home[e], d
                    count += 1
            elif after[d, e] and not before[d, e]:
                best, least = -1, np.int64(2**62)
                for h in range(num_devices):
                    far = num_devices * num_experts if h // group != d // group else 0
                    if before[h, e] and sent[h] + far < least:
                        best, least = h, sent[h] + far
                sent[best] += 1
                found[count, 0], found[count, 1], found[count, 2] = e, best, d
                count += 1
    return found[:count]


@compiled
def moves_seconds(sent: Ints, num_devices: int, costs: Costs, group: int) -> float:
    """Seconds of transfers `[M, 3]`, (4) of `Costs`: zero of none."""
    ports = np.zeros((2, 2, num_devices))
    for i in range(len(sent)):
        far = 1 if sent[i, 1] // group != sent[i, 2] // group else 0
        ports[far, 0, sent[i, 1]] += 1
        ports[far, 1, sent[i, 2]] += 1
    if len(sent) == 0:
        return 0.0
    near, far_s = ports[0].max() * costs.intra_sum_s_per_byte, ports[1].max() * costs.inter_sum_s_per_byte
    return float(costs.moves_s + costs.moved_bytes * max(near, far_s))
