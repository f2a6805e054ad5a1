"""The least load of the busiest device: a maximum flow, whose violated cut raises it until there is none; compiled.

Legend: E experts; P slots; D devices.
"""

from typing import NamedTuple

import numpy as np

from ..arrays import Bools, Ints
from ..compiled import compiled, inlined
from .holders import FAR, Holders


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


class _Levels(NamedTuple):
    """Steps from an overfull device to each device and expert, -1 where there is no way, and what they try next."""

    device: Ints
    expert: Ints
    next_device: Ints  #: Of a device: the place of its slot in `held`
    next_expert: Ints  #: Of an expert: its slot


@compiled
def relieve(served: Ints, load: Ints, holders: Holders, most: int) -> Bools:
    """Let the devices over `most` hand on what others have room for, a maximum flow, and the devices `[D]` in its way.

    What each slot serves and the loads change in place. None are in the way where all of it found room; else these
    hold `most` or more each, and nobody else can take anything that they serve.
    """
    num_experts, num_devices = len(holders.first) - 1, len(load)
    if load.max() <= most:
        return np.zeros(num_devices, np.bool_)
    by_device, by_expert = np.empty(num_devices, np.int64), np.empty(num_experts, np.int64)
    levels = _Levels(by_device, by_expert, np.empty_like(by_device), np.empty_like(by_expert))
    queue = np.empty(num_devices + num_experts, np.int64)
    leave, enter = np.empty(num_devices, np.int64), np.empty(num_devices, np.int64)
    while load.max() > most:
        ends_at = _level(served, load, holders, most, levels, queue)
        if ends_at < 0:
            return levels.device >= 0
        levels.next_device[:], levels.next_expert[:] = holders.held_first[:-1], holders.first[:-1]
        for source in range(num_devices):
            if load[source] > most:
                _hand_on(source, served, load, holders, most, levels, ends_at, leave, enter)
    return np.zeros(num_devices, np.bool_)


@compiled
def _level(served: Ints, load: Ints, holders: Holders, most: int, levels: _Levels, queue: Ints) -> int:
    """Set levels, breadth first from the overfull devices over what they serve; that of devices with room, or -1."""
    first, device, held, held_first = holders.first, holders.device, holders.held, holders.held_first
    level_d, level_e, num_devices = levels.device, levels.expert, len(load)
    level_d[:], level_e[:], at, end, ends_at = -1, -1, 0, 0, -1
    for d in range(num_devices):
        if load[d] > most:
            level_d[d], queue[end] = 0, d
            end += 1
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
    return ends_at


@inlined
def _hand_on(
    source: int,
    served: Ints,
    load: Ints,
    holders: Holders,
    most: int,
    levels: _Levels,
    ends_at: int,
    leave: Ints,
    enter: Ints,
) -> None:
    """Let a device hand on what it has too much, along the levels; `leave` and `enter` are the slots of a way."""
    first, device, expert = holders.first, holders.device, holders.expert
    held, held_first = holders.held, holders.held_first
    level_d, level_e, next_d, next_e = levels.device, levels.expert, levels.next_device, levels.next_expert
    depth, d = 0, source
    while load[source] > most:
        if load[d] < most and level_d[d] == ends_at:
            amount = min(load[source] - most, most - load[d])
            for i in range(depth):
                amount = min(amount, served[leave[i]])
            load[source] -= amount
            load[d] += amount
            for i in range(depth - 1, -1, -1):
                served[leave[i]] -= amount
                served[enter[i]] += amount
                if served[leave[i]] == 0:  # the way goes on from here
                    depth, d = i, device[leave[i]]
            continue
        moved = False
        while next_d[d] < held_first[d + 1] and not moved:
            p = held[next_d[d]]
            e = expert[p]
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
        if not moved and depth == 0:
            break
        if not moved:  # a dead end: the expert's next holder
            depth -= 1
            d = device[leave[depth]]
            next_e[expert[enter[depth]]] += 1


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
