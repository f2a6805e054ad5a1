"""Few operations that let more of the load be routed, chosen by the cut in its way; compiled, integers.

To be imported in the call that needs it.

Legend: B load vectors; E experts; D devices, S slots of each.
"""

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools, Ints
from ..compiled import compiled
from ..draws import below
from ..quota import FAR, Holders, least, pour, poured, relieve
from .seconds import over_steps
from .state import holds, slots_in

TRIED = 16  # candidates of which the potential is found, an operation
SURE = 8  # of these in any case; the others where they promise more than the best has
WIDTH = 8  # devices outside the cut that take something
BUSIEST = 4  # devices whose slots may be traded
KICK = 3  # trades
PARTS = 1 << 20  # in which slack is counted


@compiled
def guided(
    table: Ints, totals: Ints, kept: Bools, slack: float, gain_s: float, cell_s: float, quantile: float = 0.0
) -> tuple[Ints, int]:
    """A table `[D, S]` after the operations that pay, and the number of cells that it was sent.

    Parameters
    ----------
    table
        The expert in every slot, -1 in an empty one.
    totals
        Pairs by vector and expert, `[B, E]`.
    kept
        Whether an expert must stay on a device, `[D, E]`.
    slack
        Of the devices' mean load, how much more a device may serve.
    gain_s, cell_s
        Seconds that 1.0 less of max/mean saves until the horizon, and that a cell costs.
    quantile
        Of the vectors' max/mean, which counts; 0: their mean.

    Notes
    -----
    The potential is the number of pairs that cannot be routed at the cap, summed over the vectors. (The busiest
    device's load would not do: where several sets are as overfull, no single operation lowers it.) Of the vector with
    most of them, R are the devices in the flow's way, A the experts that they serve. On the least laden devices outside
    R an expert of A may take an empty slot, or that of a replica (expand, and shrink): at most

        min(room_d + x_yd, flow of e in R, pairs over) - x_yd

    more pairs are routed then; or a slot of a busy device is traded for one of theirs (migrate), which moves two. The
    most promising are tried, and the one with the largest fall per cell is taken, until nothing is over or falls. Of
    the operations the first k are kept that are worth most: less max/mean, at `gain_s`, without what cells cost.
    """
    num_experts, num_devices = totals.shape[1], len(table)
    now, best = table.copy(), table.copy()
    cap = caps(totals, num_devices, slack)
    start, cells, best_cells, worth = 0.0, 0, 0, 0.0
    for k in range(table.size + 1):
        ratio = busiest_ratio(now, totals, quantile)
        start = ratio if k == 0 else start
        if (start - ratio) * gain_s - cells * cell_s > worth:
            worth, best_cells = (start - ratio) * gain_s - cells * cell_s, cells
            best[:] = now
        taken = operate(now, slots_in(now, num_experts), totals, kept, cap)
        if taken == 0:
            break
        cells += taken
    return best, best_cells


@compiled
def settled(table: Ints, totals: Ints, kept: Bools, slack: float, kicks: int, seed: NDArray[np.uint64]) -> Ints:
    """A table `[D, S]` after all operations that lower the potential, whatever they cost, and again after kicks.

    A kick changes random slots of the best table so far; what the operations make of it is kept if no more pairs are
    over. It ends where none are. Parameters as of `guided`.
    """
    cap = caps(totals, len(table), slack)
    best, over = table.copy(), FAR
    for k in range(kicks + 1):
        now = best.copy()
        for _ in range(KICK if k > 0 else 0):
            _trade(now, kept, seed)
        for _ in range(now.size):
            if operate(now, slots_in(now, totals.shape[1]), totals, kept, cap) == 0:
                break
        new = unrouted(now, totals, cap)
        if new <= over:
            best, over = now, new
        if over == 0:
            break
    return best


@compiled
def unrouted(table: Ints, totals: Ints, cap: Ints) -> int:
    """The potential: pairs of all vectors that cannot be routed at the caps."""
    slots, over = slots_in(table, totals.shape[1]), 0
    for b in range(len(totals)):
        served, load = poured(totals[b], slots)
        relieve(served, load, slots, cap[b])
        over += np.maximum(load - cap[b], 0).sum()
    return over


@compiled
def busiest_ratio(table: Ints, totals: Ints, quantile: float = 0.0) -> float:
    """Max/mean under the exact split: a quantile over the vectors, 0: their mean."""
    slots, ratios = slots_in(table, totals.shape[1]), np.zeros(len(totals))
    for b in range(len(totals)):
        most, _, _ = least(totals[b], slots)
        ratios[b] = most * len(table) / max(totals[b].sum(), 1)
    return over_steps(ratios, quantile)


@compiled
def _trade(table: Ints, kept: Bools, seed: NDArray[np.uint64]) -> None:
    """Trade two random slots of devices that may hold each other's expert; or put another expert in a replica's."""
    (num_devices, width), num_experts = table.shape, kept.shape[1]
    held = holds(table, num_experts)
    d, s, g, t = below(seed, num_devices), below(seed, width), below(seed, num_devices), below(seed, width)
    e, y = table[d, s], table[g, t]
    if (e >= 0 and kept[d, e]) or (y >= 0 and kept[g, y]):
        return
    if below(seed, 4) == 0:
        y = below(seed, num_experts)
        if not held[d, y] and (e < 0 or held[:, e].sum() > 1):
            table[d, s] = y
        return
    if d != g and (e < 0 or not held[g, e]) and (y < 0 or not held[d, y]):
        table[d, s], table[g, t] = y, e


@compiled
def caps(totals: Ints, num_devices: int, slack: float) -> Ints:
    """The most that a device may serve of every vector, `[B]`: the mean and so much more of it, rounded up."""
    cap = np.empty(len(totals), np.int64)
    more = PARTS + int(slack * PARTS)
    for b in range(len(totals)):
        cap[b] = -(-totals[b].sum() * more // (num_devices * PARTS))
    return cap


@compiled
def operate(table: Ints, slots: Holders, totals: Ints, kept: Bools, cap: Ints) -> int:
    """Make the operation with the largest fall of the potential per cell; the cells it takes: 0 where none helps."""
    num_vectors, (num_devices, num_slots) = len(totals), table.shape
    served, load = (
        np.zeros((num_vectors, num_devices, num_slots), np.int64),
        np.zeros((num_vectors, num_devices), np.int64),
    )
    worst, over, reached = 0, np.zeros(num_vectors, np.int64), np.zeros(num_devices, np.bool_)
    for b in range(num_vectors):
        served_P, load[b] = poured(totals[b], slots)
        way = relieve(served_P, load[b], slots, cap[b])
        for p in range(len(served_P)):
            served[b, slots.device[p], slots.column[p] % num_slots] = served_P[p]
        over[b] = np.maximum(load[b] - cap[b], 0).sum()
        if over[b] > over[worst] or b == 0:
            worst, reached = b, way
    before, order = over.sum(), np.argsort(-over)  # most of it comes first, so that what helps too little is left soon
    if before == 0:
        return 0
    change, worth = _candidates(table, slots, served[worst], load[worst], reached, kept, cap[worst])
    best, fall, cells = -1, 0, 1
    for i in range(len(change)):
        size = 1 if change[i, 3] < 0 else 2
        if i >= SURE and worth[i] * cells <= 2 * fall:
            break
        _exchange(table, change[i])
        d, s = change[i, 0], change[i, 1]
        after, changed = 0, slots_in(table, totals.shape[1])
        for b in order:
            after += _over(changed, served[b], load[b], totals[b], change[i], table[d, s], cap[b])
            if (before - after) * cells <= fall * size:
                break
        _exchange(table, change[i])
        if (before - after) * cells > fall * size:
            best, fall, cells = i, before - after, size
    if best < 0:
        return 0
    _exchange(table, change[best])
    return cells


@compiled
def _exchange(table: Ints, change: Ints) -> None:
    """Put an expert in a slot, and what was there in the slot traded for it, if any; a second time takes it back."""
    d, s, e, g, t = change
    change[2] = table[d, s]
    table[d, s] = e
    if g >= 0:
        table[g, t] = change[2]


@compiled
def _over(slots: Holders, served: Ints, load: Ints, total: Ints, change: Ints, new: int, cap: int) -> int:
    """Pairs of a vector that cannot be routed at the cap.

    Parameters
    ----------
    slots
        After `change`, by which a slot holds `new`.
    served, load
        A maximum flow before it, by device and slot `[D, S]`, and its loads `[D]`.
    """
    d, s, old, g, t = change
    width, now, order = served.shape[1], load.copy(), np.empty(len(load), np.int64)
    x = served.ravel()[slots.column]
    now[d] -= served[d, s]
    if g >= 0:
        now[g] -= served[g, t]
    for e in (new, old):
        if e >= 0:
            rest = total[e]
            for p in range(slots.first[e], slots.first[e + 1]):
                if slots.column[p] == d * width + s or slots.column[p] == g * width + t:
                    x[p] = 0
                rest -= x[p]
            pour(rest, slots.first[e], slots.first[e + 1], x, now, slots.device, order)
    relieve(x, now, slots, cap)
    over = 0
    for d in range(len(now)):
        over += max(now[d] - cap, 0)
    return over


@compiled
def _candidates(
    table: Ints, slots: Holders, served: Ints, load: Ints, reached: Bools, kept: Bools, cap: int
) -> tuple[Ints, Ints]:
    """The most promising changes `[K, 5]`, and twice what each may gain per cell.

    A change: device, slot, expert for it; and device and slot traded for it, or -1.
    """
    num_devices, num_slots = table.shape
    num_experts = len(slots.first) - 1
    held, count, flow = holds(table, num_experts), np.diff(slots.first), np.zeros(num_experts, np.int64)
    excess = np.maximum(load - cap, 0).sum()
    for d in range(num_devices):
        if reached[d]:
            for s in range(num_slots):
                if table[d, s] >= 0:
                    flow[table[d, s]] += served[d, s]
    within, outs = np.flatnonzero(flow), _least_laden(table, count, load, reached, kept)
    worth, change = np.zeros(TRIED, np.int64), np.zeros((TRIED, 5), np.int64)
    for d in outs:
        for s in range(num_slots):
            y = table[d, s]
            if y < 0 or (count[y] > 1 and not kept[d, y]):
                there = served[d, s]
                for e in within:
                    if not held[d, e]:
                        gain = min(cap - load[d] + there, flow[e], excess) - there
                        _keep(2 * gain, worth, change, d, s, int(e), -1, -1)
    for g in np.argsort(-load, kind="mergesort")[:BUSIEST]:
        for d in outs if load[g] > cap else outs[:0]:
            for s in range(num_slots):
                y = table[d, s]
                for t in range(num_slots if y >= 0 and not held[g, y] and not kept[d, y] else 0):
                    e = table[g, t]
                    if e >= 0 and not held[d, e] and not kept[g, e]:
                        gain = min(served[g, t] - served[d, s], cap - load[d], load[g] - cap)
                        _keep(gain, worth, change, d, s, e, g, t)
    return change[: np.count_nonzero(worth)], worth


@compiled
def _keep(value: int, worth: Ints, change: Ints, d: int, s: int, e: int, g: int, t: int) -> None:
    """Put a change among the best, which are in falling order."""
    i = len(worth) - 1
    if value <= worth[i]:
        return
    while i > 0 and worth[i - 1] < value:
        worth[i] = worth[i - 1]
        change[i] = change[i - 1]
        i -= 1
    worth[i] = value
    change[i, 0], change[i, 1], change[i, 2], change[i, 3], change[i, 4] = d, s, e, g, t


@compiled
def _least_laden(table: Ints, count: Ints, load: Ints, reached: Bools, kept: Bools) -> Ints:
    """Devices outside the cut, least laden first; then as many that have a slot to give: empty, or a replica's."""
    chosen, n = np.full(WIDTH, -1), 0
    order = np.argsort(load, kind="mergesort")
    for d in order:
        if not reached[d] and n < (WIDTH + 1) // 2:
            chosen[n] = d
            n += 1
    for d in order:
        if not reached[d] and n < WIDTH and not (chosen[:n] == d).any():
            for y in table[d]:
                if y < 0 or (count[y] > 1 and not kept[d, y]):
                    chosen[n] = d
                    n += 1
                    break
    return chosen[:n]
