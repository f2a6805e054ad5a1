"""A search for the table of least predicted seconds on some load vectors, by single and compound moves; compiled.

To be imported in the call that needs it.

Legend: B load vectors; E experts; D devices in nodes of G, S slots of each.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools, Floats, Ints
from ..compiled import compiled
from ..draws import below, unit
from ..quota import FAR, least, nearest
from .costs import Costs
from .seconds import busiest, exchange_seconds, link_ratio, over_steps, served_ports, sums_seconds
from .state import holders_in, holds, sum_ports

EMPTY = -1
DRAWN = 2  # of what could be put somewhere, the one that spares most traffic is
HOPED, MORE = 0.9, 2.0  # of exchanges, what a move may leave; of the latest vector's gain, the others'
COOLING = 1.25e-6  # of the value at the start: how much less an evaluation lets a move cost, with probability 1 / e
TRADE, ADD, REPLACE, DROP, SPREAD, KINDS = 8, 12, 15, 17, 19, 20  # moves of each kind in twenty, added up
AIMS = 3  # devices that moves aim at: the one of most load, of the busiest port, of most gradient rows


class Search(NamedTuple):
    """Input of a search: loads, prices and the placement that it starts from."""

    pairs: Ints  #: By vector, expert and source, `[B, E, D]`
    totals: Ints  #: `[B, E]`
    batches: int  #: Micro-batches that a vector sums
    origin: Bools  #: Whether a device holds an expert, `[D, E]`
    home: Ints  #: Of every expert, `[E]`
    group: int
    costs: Costs
    horizon: float  #: Steps over which a move is paid
    quantile: float  #: Of the vectors' seconds, which counts; 0: their mean
    #: own, near: the vectors' pairs of every device, and of every node times what crossing costs beyond; by expert
    own: Ints
    near: Ints

    @classmethod
    def of(
        cls,
        pairs: Ints,
        batches: int,
        origin: Bools,
        home: Ints,
        group: int,
        costs: Costs,
        horizon: float,
        quantile: float = 0.0,
    ) -> Self:
        """The task of finding a placement for these vectors; parameters as the fields."""
        own = pairs.sum(axis=0).T.copy()
        near = own.reshape(-1, group, own.shape[1]).sum(axis=1) * (link_ratio(costs) - 1)
        return cls(pairs, pairs.sum(axis=2), batches, origin, home, group, costs, horizon, quantile, own, near)


@compiled
def searched(table: Ints, task: Search, evaluations: int, seed: NDArray[np.uint64]) -> tuple[Ints, float]:
    """The best table of so many tried, and its `value`, from a table `[D, S]` on, -1 in empty slots.

    Notes
    -----
    Annealing: the longer a search is, the more a move may cost at its start. Half of the moves are aimed at a device
    that is busiest in some respect. A move trades two slots; puts an expert into an empty slot, or that of a replica;
    empties that of a replica; gives an expert one more replica on every node; or takes all of its replicas off a node.
    The last two are several changes at once: each alone may cost seconds.
    """
    num_experts = task.totals.shape[1]
    now, held = table.copy(), holds(table, num_experts)
    count = held.sum(axis=0)
    aims = np.zeros(AIMS, np.int64)
    known = np.zeros(len(task.pairs))
    value = seconds_of(now, held, task, np.inf, aims, known)
    cooling_s, best, best_value, tried, exchanges = COOLING * value, now.copy(), value, aims.copy(), known.copy()
    change = np.empty((2 * len(table) + 2, 4), np.int64)  # device, slot, expert before and after
    done = 0
    for _ in range(20 * evaluations):
        if done >= evaluations:
            break
        n = _move(now, held, count, task, aims, change, seed)
        if n == 0:
            continue
        limit = value - cooling_s * (evaluations - done) * np.log(max(unit(seed), 1e-9))
        done += 1
        exchanges[:] = known
        new = seconds_of(now, held, task, limit, tried, exchanges)
        if new <= limit:
            value = new
            aims[:], known[:] = tried, exchanges
            if value < best_value:
                best_value = value
                best[:] = now
        else:
            for i in range(n - 1, -1, -1):
                _put(now, held, count, change[i, 0], change[i, 1], change[i, 2])
    return best, best_value


@compiled
def seconds_of(table: Ints, held: Bools, task: Search, limit: float, aims: Ints, known: Floats) -> float:
    """Predicted seconds of the vectors with the price of what moves; infinite where they are likely over `limit`.

    Ports count as `seconds.busiest` has it in a search. `aims` are set to the devices that moves should aim at. `known`
    are the seconds of the vectors' exchanges before the move, `[B]` (zero: not known), and after it: it is given up
    where it would have to spare more than a tenth of them, or the other vectors more than twice what the latest does.
    """
    costs, num_vectors, num_devices = task.costs, len(task.pairs), len(table)
    value = price(held, task)
    holders = holders_in(table, task.totals.shape[1], task.group)
    rows = sum_ports(holders)
    value += sums_seconds(rows, costs, True)
    even, before = costs.pair_s * task.totals.sum(axis=1) / num_devices, known.copy()
    likely = even + HOPED * before
    if value + over_steps(likely, task.quantile) > limit:
        return np.inf
    ratio, worst, slowest = link_ratio(costs), 0, 0.0
    for b in range(num_vectors - 1, -1, -1):  # the latest first
        most, _, load = least(task.totals[b], holders)
        if most > worst:
            worst, aims[0] = most, load.argmax()
        served = nearest(task.pairs[b], task.totals[b], holders, most, ratio)
        ports = served_ports(task.pairs[b], served, holders)
        known[b] = exchange_seconds(ports, costs, task.batches, True)
        likely[b] = costs.pair_s * most + known[b]
        likely[:b] = even[:b] + before[:b] + min(0.0, known[b] - before[b]) * MORE
        if value + over_steps(likely, task.quantile) > limit:
            return np.inf
        if known[b] > slowest:
            slowest = known[b]
            aims[1] = _busiest_port(ports[0] * costs.intra_s_per_byte, ports[1] * costs.inter_s_per_byte)
    aims[2] = (rows[0] * costs.intra_sum_s_per_byte + rows[1] * costs.inter_sum_s_per_byte).argmax()
    return float(value + over_steps(likely, task.quantile))


@compiled
def _busiest_port(near: Floats, far: Floats) -> int:
    """The device with the busiest port, of seconds by direction and device `[2, D]`."""
    ports = far if far.max() > near.max() else near
    return int(np.maximum(ports[0], ports[1]).argmax())


@compiled
def price(held: Bools, task: Search) -> float:
    """Seconds per step of what moves: (4), by the cells that devices hold newly, or by the homes that they lost."""
    costs = task.costs
    num_devices, num_experts = held.shape
    ports = np.zeros((2, num_devices))
    for e in range(num_experts):
        if costs.replicas_free:
            if not held[task.home[e], e]:
                node = task.home[e] // task.group
                near = held[node * task.group : (node + 1) * task.group, e].any()
                ports[0 if near else 1, task.home[e]] += 1
            continue
        for d in range(num_devices):
            if held[d, e] and not task.origin[d, e]:
                node = d // task.group
                near = task.origin[node * task.group : (node + 1) * task.group, e].any()
                ports[0 if near else 1, d] += 1
    near_s = costs.intra_sum_s_per_byte * busiest(ports[0], True)
    return costs.moved_bytes * max(near_s, costs.inter_sum_s_per_byte * busiest(ports[1], True)) / task.horizon


@compiled
def _put(table: Ints, held: Bools, count: Ints, d: int, s: int, e: int) -> None:
    """Put an expert, or nothing, into a slot."""
    old = table[d, s]
    if old >= 0:
        held[d, old] = False
        count[old] -= 1
    if e >= 0:
        held[d, e] = True
        count[e] += 1
    table[d, s] = e


@compiled
def _changed(table: Ints, held: Bools, count: Ints, d: int, s: int, e: int, change: Ints, n: int) -> int:
    """Put an expert into a slot and note it as change n; the changes noted."""
    change[n, 0], change[n, 1], change[n, 2], change[n, 3] = d, s, table[d, s], e
    _put(table, held, count, d, s, e)
    return n + 1


@compiled
def _spare(table: Ints, count: Ints, d: int, seed: NDArray[np.uint64]) -> int:
    """A random slot of a device that is empty or a replica's, empty ones first; -1 where there is none."""
    width = table.shape[1]
    start, found = below(seed, width), -1
    for i in range(width):
        s = (start + i) % width
        if table[d, s] < 0:
            return int(s)
        if count[table[d, s]] > 1 and found < 0:
            found = s
    return found


@compiled
def _locality(task: Search, held: Bools, d: int, e: int) -> int:
    """Traffic that an expert on a device spares, at most: its own pairs, and its node's where no other holds it."""
    if e < 0:
        return 0
    node = d // task.group
    for g in range(node * task.group, (node + 1) * task.group):
        if g != d and held[g, e]:
            return int(task.own[d, e])
    return int(task.own[d, e] + task.near[node, e])


@compiled
def _move(
    table: Ints, held: Bools, count: Ints, task: Search, aims: Ints, change: Ints, seed: NDArray[np.uint64]
) -> int:
    """Make a random move; how many changes it took, 0 where it was none."""
    d = aims[below(seed, AIMS)] if below(seed, 2) else below(seed, len(table))
    s = below(seed, table.shape[1])
    e, kind = table[d, s], below(seed, KINDS)
    if kind < TRADE:
        return _traded(table, held, count, task, d, s, change, seed)
    if ADD <= kind < REPLACE:
        y = _drawn_expert(held, task, d, seed)
        if y < 0 or (e >= 0 and count[e] == 1):
            return 0
        return _changed(table, held, count, d, s, y, change, 0)
    if e < 0:
        return 0
    if kind < ADD:
        g = _drawn_device(held, task, e, seed)
        t = _spare(table, count, g, seed) if g >= 0 else -1
        return _changed(table, held, count, g, t, e, change, 0) if t >= 0 else 0
    if kind < DROP:
        return _changed(table, held, count, d, s, EMPTY, change, 0) if count[e] > 1 else 0
    if kind < SPREAD:
        return _on_every_node(table, held, count, task, e, change, seed)
    return _off_node(table, held, count, task, d // task.group, e, change)


@compiled
def _traded(
    table: Ints, held: Bools, count: Ints, task: Search, d: int, s: int, change: Ints, seed: NDArray[np.uint64]
) -> int:
    """Trade a slot's expert for that of a slot drawn at random, of which the one that spares most traffic."""
    e, g, t, most = table[d, s], -1, -1, -FAR
    for _ in range(DRAWN):
        h, u = below(seed, len(table)), below(seed, table.shape[1])
        y = table[h, u]
        if h == d or e == y or (e >= 0 and held[h, e]) or (y >= 0 and held[d, y]):
            continue
        gain = _locality(task, held, h, e) + _locality(task, held, d, y)
        gain -= _locality(task, held, d, e) + _locality(task, held, h, y)
        if gain > most:
            g, t, most = h, u, gain
    if g < 0:
        return 0
    y = table[g, t]
    n = _changed(table, held, count, d, s, EMPTY, change, 0)
    n = _changed(table, held, count, g, t, e, change, n)
    return _changed(table, held, count, d, s, y, change, n)


@compiled
def _drawn_device(held: Bools, task: Search, e: int, seed: NDArray[np.uint64]) -> int:
    """The device without an expert, of some drawn, where it spares most traffic; -1 where none was drawn."""
    g, most = -1, -FAR
    for _ in range(DRAWN):
        h = below(seed, len(held))
        if not held[h, e] and _locality(task, held, h, e) > most:
            g, most = h, _locality(task, held, h, e)
    return g


@compiled
def _drawn_expert(held: Bools, task: Search, d: int, seed: NDArray[np.uint64]) -> int:
    """The expert that a device lacks, of some drawn, that spares most traffic there; -1 where none was drawn."""
    y, most = -1, -FAR
    for _ in range(DRAWN):
        x = below(seed, held.shape[1])
        if not held[d, x] and _locality(task, held, d, x) > most:
            y, most = x, _locality(task, held, d, x)
    return y


@compiled
def _on_every_node(
    table: Ints, held: Bools, count: Ints, task: Search, e: int, change: Ints, seed: NDArray[np.uint64]
) -> int:
    """Give an expert one more replica on every node that has a spare slot where it looks."""
    n = 0
    for first in range(0, len(table), task.group):
        for _ in range(task.group):
            g = first + below(seed, task.group)
            t = -1 if held[g, e] else _spare(table, count, g, seed)
            if t >= 0:
                n = _changed(table, held, count, g, t, e, change, n)
                break
    return n


@compiled
def _off_node(table: Ints, held: Bools, count: Ints, task: Search, node: int, e: int, change: Ints) -> int:
    """Take all replicas of an expert off a node, where another node has one."""
    first, end = node * task.group, (node + 1) * task.group
    if held[first:end, e].sum() == count[e]:
        return 0
    n = 0
    for g in range(first, end):
        for t in range(table.shape[1]):
            if table[g, t] == e:
                n = _changed(table, held, count, g, t, EMPTY, change, n)
    return n
