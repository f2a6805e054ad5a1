"""Search for a placement of one layer whose steps are each split exactly over replicas (`quota.least`), compiled.

To be imported in the call that needs it.

Legend: B steps; E experts; p slots on D devices.
"""

import numpy as np

from ..arrays import Bools, Ints
from ..compiled import compiled
from ..draws import SEED, below, unit
from ..quota import Holders, least, slots_of

HEAT = 0.002  # of the mean of max/mean, that a change may cost at first
DRAWS = 30  # changes drawn, legal or not, for each that is looked at in all steps


@compiled
def refine_split(pairs: Ints, table: Ints, first: Ints, pinned: Bools, allowed: Bools, tries: int) -> Ints:
    """A layer whose mean over steps of max/mean is lower than a legal one's, or as low, `[p]`.

    Parameters
    ----------
    pairs
        `[B, E]`.
    table, first
        The expert in every slot, and the first slot of each device, with the end, `[D + 1]`.
    pinned, allowed
        Cells that stay, and cells that an expert may be in, `[D, E]`.
    tries
        Changes to look at, if each was looked at in all steps.

    Notes
    -----
    Annealing. Experts that certain devices alone serve bound a step's busiest device: the violated cut. A change takes
    an expert of the cut of a step, one of the busier of three, to a device outside it: in place of a replica, or in
    exchange. Steps are looked at from the busiest on, until the change costs more than the temperature lets it.
    """
    (num_steps, num_experts), num_devices = pairs.shape, len(first) - 1
    device, copies = np.empty(len(table), np.int64), np.zeros(num_experts, np.int64)
    held = np.zeros((num_devices, num_experts), np.bool_)
    for d in range(num_devices):
        for i in range(first[d], first[d + 1]):
            device[i], held[d, table[i]] = d, True
            copies[table[i]] += 1
    live = (first[1:] > first[:-1]).sum()
    mean = np.maximum(pairs.sum(axis=1) / live, 1e-12)
    seed, table, changed = np.array([SEED], np.uint64), table.copy(), table.copy()
    value, other = np.ones(num_steps), np.ones(num_steps)
    proof, proved = np.zeros((2, num_steps, num_devices), np.bool_)
    holders = slots_of(table, first, num_experts)
    for b in range(num_steps):
        value[b] = _ratio(pairs[b], mean[b], holders, proof[b])
    total, order = value.sum(), np.argsort(-value)
    best, lowest, floor = table.copy(), total, np.ceil(mean - 1e-9)
    work, looked, drawn = tries * num_steps, 0, 0
    while looked < work and drawn < DRAWS * tries and lowest > (floor / mean).sum() + 1e-9:
        drawn += 1
        heat = HEAT * (1 - max(looked / work, drawn / (DRAWS * tries)))
        limit = total - heat * np.log(max(unit(seed), 1e-12)) * num_steps
        b = order[min(below(seed, num_steps), below(seed, num_steps), below(seed, num_steps))]
        j = below(seed, len(table))  # the slot that gives way
        for _ in range(len(table)):
            if not proof[b, device[j]]:
                break
            j = j + 1 if j + 1 < len(table) else 0
        i = _of_cut(table, holders, proof[b], below(seed, len(table)))
        x, y, p, q = table[i], table[j], device[i], device[j]
        if held[q, x] or pinned[q, y] or not allowed[q, x]:
            continue
        alone = copies[y] >= 2 and below(seed, 2) == 0
        if not alone and (held[p, y] or pinned[p, x] or not allowed[p, y]):
            continue
        changed[:] = table
        changed[j] = x
        if not alone:
            changed[i] = y
        after, sum_of = slots_of(changed, first, num_experts), float(num_steps)
        for b in order:
            other[b] = _ratio(pairs[b], mean[b], after, proved[b])
            sum_of += other[b] - 1
            looked += 1
            if sum_of > limit:
                break
        if sum_of > limit:
            continue
        table[:], held[q, x], held[q, y], holders = changed, True, False, after
        if alone:
            copies[x], copies[y] = copies[x] + 1, copies[y] - 1
        else:
            held[p, x], held[p, y] = False, True
        value, other, proof, proved, total = other, value, proved, proof, sum_of
        order = np.argsort(-value)
        if total < lowest - 1e-12:
            best[:], lowest = table, total
    return best


@compiled
def _ratio(pairs: Ints, mean: float, holders: Holders, proof: Bools) -> float:
    """Max/mean of a step, and the devices that prove it."""
    most, proof[:], _ = least(pairs, holders)
    return max(most / mean, 1.0)


@compiled
def _of_cut(table: Ints, holders: Holders, proof: Bools, start: int) -> int:
    """A slot of an expert that the proving devices alone hold, the first from `start` on."""
    for turn in range(len(table)):
        i = (start + turn) % len(table)
        e, inside = table[i], True
        for p in range(holders.first[e], holders.first[e + 1]):
            inside = inside and proof[holders.device[p]]
        if inside:
            return i
    return start
