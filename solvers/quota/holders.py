"""Holders of the experts of a layer: slots by expert and by device, their cells, and the arcs of the flow over these.

Legend: E experts; P slots; C cells; D devices.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Ints
from ..compiled import compiled

FAR = 2**62  # more pairs than there are


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
    cell, node, cell_first, expert_first = _cells(slots.first, slots.device, group)
    start, end, item, less, more = _arcs(slots, cell, cell_first)
    return Holders(
        slots.first,
        slots.device,
        slots.expert,
        cell,
        cell_first,
        expert_first,
        slots.held,
        slots.held_first,
        node,
        group,
        slots.column,
        start,
        end,
        item,
        less,
        more,
    )


@compiled
def _cells(first: Ints, device: Ints, group: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cell of every slot, node and first slot of every cell, and first cell of every expert.

    The slots of an expert on a node follow one another.
    """
    num_experts, num_slots = len(first) - 1, len(device)
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
    return cell, node[:cells], cell_first[: cells + 1], expert_first


@compiled
def _arcs(slots: Holders, cell: Ints, cell_first: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Arcs of the flow by the node that they leave: from device to cell or cell to expert, then back.

    `start` of each node's arcs, the `end` and the `item` (slot, or P plus cell) of each arc, and an item's arcs up
    (`less`) and back (`more`), -1 where its expert has no other slot.
    """
    first, device, expert = slots.first, slots.device, slots.expert
    num_experts, num_devices, num_slots = len(first) - 1, len(slots.held_first) - 1, len(device)
    cells = len(cell_first) - 1
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
    return start, end, item, less, more
