"""Annealing by block moves, compiled: some experts of two devices are dealt anew over all layers at once.

A layer has few ways to deal K experts to two devices and meets its neighbours only, so that the weights of all chains
of deals sum up layer by layer, and a chain is drawn backwards from the Boltzmann distribution: exact where swaps one by
one would have to climb. At temperature 0 it is the best chain.

All in one file, because numba renews what it cached when the file of a function changes, not that of one it calls.
To be imported in the call that needs it.

Legend: L MoE layers; P places a layer, experts first and weightless ones behind; D devices; N nodes (0: one level);
K = 2 m experts dealt a layer, m of them to device p; ways to deal by the bits of `low` (first m experts) and `high`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled

__all__ = ["Deals", "State", "add_pulls", "anneal", "descend", "resample", "swap"]

STEEPEST = 150.0  # exponents are cut off there, so that products of four do not overflow
NEVER = 300.0  # ways so many temperatures below the best are not summed
TOURNAMENT = 2  # candidates a pick, times experts a device over those picked
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pulls = NDArray[np.int32]


class State(NamedTuple):
    """Weights as integers, the homes of all experts, and the pulls that follow from both.

    `after[l]` is W of layer pair (l, l + 1), `before[l]` its transpose, `beside[l]` the weights inside layer l (no
    layers: none). `pull[l, d, e]` sums the weights between expert e of layer l and all experts on device d of its own
    and the neighbouring layers; `node_pull` likewise. Expert e of layer l is on `home[l, e]`, in place `place[l, e]`,
    which `occupant[l]` inverts; device d owns the places `[first[d], first[d + 1])`. A pair on one device is worth
    `worth[0]` times its weight, on one node `worth[1]` besides. A device's sum of `load` stays within `cap[l]`.
    `twin[l, e]` numbers the expert that replicas share, -1 without; twins keep to different devices.
    """

    after: Pulls
    before: Pulls
    beside: Pulls
    worth: NDArray[np.float64]
    group: int
    first: Ints
    load: NDArray[np.float64]
    cap: NDArray[np.float64]
    twin: Ints
    home: Ints
    place: Ints
    occupant: Ints
    held: NDArray[np.float64]
    pull: Pulls
    node_pull: Pulls


class Deals(NamedTuple):
    """The ways to deal 2 m experts, m to each of two devices, and room to work in.

    Way s gives the experts of the bits of `low[s]` and `high[s]` to p. `size[x]` counts the bits of x.
    """

    m: int
    low: Ints
    high: Ints
    size: Ints
    member: Ints
    side: Floats
    own: Floats
    message: Floats
    back: NDArray[np.int32]
    link: Floats


@compiled
def anneal(
    state: State, deals: tuple[Deals, ...], blocks: int, start: float, end: float, seed: NDArray[np.uint64]
) -> None:
    """Make `blocks` block moves between random devices, the temperature falling from `start` to `end`.

    Parameters
    ----------
    deals
        Of 1, 2, ... experts of each device; the widest that both devices fill is dealt.
    """
    num_devices = len(state.first) - 1
    for block in range(blocks):
        p = _below(seed, num_devices)
        q = _partner(state, p, seed)
        width = _width(state, p, q, len(deals))
        if width:
            resample(state, deals[width - 1], p, q, start * (end / start) ** (block / blocks), seed)


@compiled
def descend(state: State, deals: tuple[Deals, ...], device: int, seed: NDArray[np.uint64]) -> None:
    """Deal the experts of a device and of each later one at their best, one after the other."""
    for other in range(device + 1, len(state.first) - 1):
        width = _width(state, device, other, len(deals))
        if width:
            resample(state, deals[width - 1], device, other, 0.0, seed)


@compiled
def resample(state: State, deals: Deals, p: int, q: int, temperature: float, seed: NDArray[np.uint64]) -> None:
    """Deal m random experts of each of devices p and q anew in all layers; at temperature 0 at their best.

    Notes
    -----
    With sigma[l, i] = 1 for members on p, else 0, the value is, up to a constant,

        sum_l own[l, s_l] + kappa sum_{l,i,j} W[l,i,j] (2 sigma[l,i] sigma[l+1,j] - sigma[l,i] - sigma[l+1,j])

    own collects the pulls of everyone who stays, the pairs inside the layer, and forbids what the caps do not allow.
    """
    num_layers = len(state.pull)
    nodes = state.node_pull.shape[1] > 0 and p // state.group != q // state.group
    kappa = state.worth[0] + (state.worth[1] if nodes else 0.0)
    for layer in range(num_layers):
        _choose(state, deals, layer, p, q, seed)
    for layer in range(num_layers - 1):
        for i in range(2 * deals.m):
            row = state.after[layer, deals.member[layer, i]]
            for j in range(2 * deals.m):
                deals.link[layer, i, j] = kappa * row[deals.member[layer + 1, j]]
    for layer in range(num_layers):
        _weigh(state, deals, layer, p, q, kappa)
    deals.message[0] = deals.own[0]
    for layer in range(num_layers - 1):
        if temperature > 0:
            _sum_over(deals, layer, temperature)
        else:
            _best_over(deals, layer)
    way = _drawn(deals.message[num_layers - 1], temperature, seed)
    for layer in range(num_layers - 1, -1, -1):
        before = way
        if layer > 0:
            before = _drawn_before(deals, layer, way, temperature, seed) if temperature > 0 else deals.back[layer, way]
        _deal(state, deals, layer, way)
        way = before


@compiled
def swap(state: State, layer: int, a: int, b: int) -> None:
    """Let experts a and b of a layer change homes."""
    p, q = state.home[layer, a], state.home[layer, b]
    m, n = p // state.group, q // state.group
    nodes = state.node_pull.shape[1] > 0 and m != n
    if layer + 1 < len(state.pull):
        _shift(state.after[layer, a], state.after[layer, b], state.pull[layer + 1], p, q)
        if nodes:
            _shift(state.after[layer, a], state.after[layer, b], state.node_pull[layer + 1], m, n)
    if layer > 0:
        _shift(state.before[layer - 1, a], state.before[layer - 1, b], state.pull[layer - 1], p, q)
        if nodes:
            _shift(state.before[layer - 1, a], state.before[layer - 1, b], state.node_pull[layer - 1], m, n)
    if len(state.beside):
        _shift(state.beside[layer, a], state.beside[layer, b], state.pull[layer], p, q)
        if nodes:
            _shift(state.beside[layer, a], state.beside[layer, b], state.node_pull[layer], m, n)
    more = state.load[layer, b] - state.load[layer, a]
    state.held[layer, p] += more
    state.held[layer, q] -= more
    state.home[layer, a], state.home[layer, b] = q, p
    at, to = state.place[layer, a], state.place[layer, b]
    state.place[layer, a], state.place[layer, b] = to, at
    state.occupant[layer, at], state.occupant[layer, to] = b, a


@compiled
def add_pulls(state: State) -> None:
    """Add up the pulls of a state whose pulls are zero."""
    num_layers, num_devices, _ = state.pull.shape
    for layer in range(num_layers):
        for device in range(num_devices):
            row = state.pull[layer, device]
            for at in range(state.first[device], state.first[device + 1]):
                if layer > 0:
                    _add(state.after[layer - 1, state.occupant[layer - 1, at]], row)
                if layer + 1 < num_layers:
                    _add(state.before[layer, state.occupant[layer + 1, at]], row)
                if len(state.beside):
                    _add(state.beside[layer, state.occupant[layer, at]], row)
            if state.node_pull.shape[1]:
                _add(row, state.node_pull[layer, device // state.group])


@compiled
def _partner(state: State, p: int, seed: NDArray[np.uint64]) -> int:
    """Another device, drawn by what pulls a random expert of p away; any where nothing does."""
    num_layers, num_devices, _ = state.pull.shape
    q = _below(seed, num_devices - 1)
    if q >= p:
        q += 1
    if state.first[p] == state.first[p + 1]:
        return q
    layer = _below(seed, num_layers)
    expert = state.occupant[layer, state.first[p] + _below(seed, state.first[p + 1] - state.first[p])]
    total = 0.0
    for d in range(num_devices):
        if d != p:
            total += state.pull[layer, d, expert]
    left = _unit(seed) * total
    for d in range(num_devices):
        if d != p:
            left -= state.pull[layer, d, expert]
            if left < 0:
                return d
    return q


@compiled
def _width(state: State, p: int, q: int, most: int) -> int:
    """How many experts of each of two devices can be dealt."""
    return int(min(state.first[p + 1] - state.first[p], state.first[q + 1] - state.first[q], most))


@compiled
def _choose(state: State, deals: Deals, layer: int, p: int, q: int, seed: NDArray[np.uint64]) -> None:
    """Pick m experts of each device; of many, each is the most wished of a few random ones.

    What is wished for by turns is a pull of the other device, and links to those picked in the layer before: threads
    of experts that follow each other move only together.
    """
    m, threads, score = deals.m, layer > 0 and _below(seed, 2) > 0, np.zeros(state.pull.shape[2])
    for side in range(2):
        here, there = (q, p) if side else (p, q)
        start, count = state.first[here], state.first[here + 1] - state.first[here]
        for at in range(start, start + count if count > m else start):
            e = state.occupant[layer, at]
            if threads:
                score[e] = 0.0
                for i in range(2 * m):
                    score[e] += state.before[layer - 1, e, deals.member[layer - 1, i]]
            else:
                score[e] = state.pull[layer, there, e] - state.pull[layer, here, e]
        picked = 0
        while picked < m:
            if count == m:
                best = state.occupant[layer, start + picked]
            else:
                best = -1
                for _ in range(TOURNAMENT * count // m):
                    e = state.occupant[layer, start + _below(seed, count)]
                    taken = False
                    for i in range(side * m, side * m + picked):
                        taken |= deals.member[layer, i] == e
                    if not taken and (best < 0 or score[e] > score[best]):
                        best = e
            if best >= 0:
                deals.member[layer, side * m + picked] = best
                deals.side[layer, side * m + picked] = 1.0 - side
                picked += 1


@compiled
def _weigh(state: State, deals: Deals, layer: int, p: int, q: int, kappa: float) -> None:
    """What each way to deal a layer is worth besides its links to the members of other layers."""
    size, member = 2 * deals.m, deals.member[layer]
    pull, field = state.pull[layer], np.empty(size)
    nodes = state.node_pull.shape[1] > 0
    for i in range(size):
        e = member[i]
        field[i] = state.worth[0] * (pull[p, e] - pull[q, e])
        if nodes:
            near = state.node_pull[layer]
            field[i] += state.worth[1] * (near[p // state.group, e] - near[q // state.group, e])
        if layer > 0:
            for j in range(size):
                field[i] -= deals.link[layer - 1, j, i] * 2 * deals.side[layer - 1, j]
        if layer + 1 < len(state.pull):
            for j in range(size):
                field[i] -= deals.link[layer, i, j] * 2 * deals.side[layer + 1, j]
    if len(state.beside):
        for i in range(size):
            for j in range(size):
                field[i] -= kappa * state.beside[layer, member[i], member[j]] * 2 * deals.side[layer, j]
    low, high = np.empty(2**deals.m), np.empty(2**deals.m)
    _subset_sums(field[: deals.m], low)
    _subset_sums(field[deals.m :], high)
    for s in range(len(deals.low)):
        deals.own[layer, s] = low[deals.low[s]] + high[deals.high[s]]
    if len(state.beside):
        for s in range(len(deals.low)):
            for i in range(size):
                for j in range(i):
                    if _to_p(deals, s, i) and _to_p(deals, s, j):
                        deals.own[layer, s] += 2 * kappa * state.beside[layer, member[i], member[j]]
    _forbid(state, deals, layer, p, q)


@compiled
def _to_p(deals: Deals, way: int, i: int) -> int:
    """Whether a way deals member i to p."""
    if i < deals.m:
        return int(deals.low[way] >> i & 1)
    return int(deals.high[way] >> (i - deals.m) & 1)


@compiled
def _subset_sums(values: Floats, sums: Floats) -> None:
    """The sums over all subsets of `values`, subset x by its bits."""
    sums[0] = 0.0
    for i in range(len(values)):
        for x in range(2**i):
            sums[2**i + x] = sums[x] + values[i]


@compiled
def _forbid(state: State, deals: Deals, layer: int, p: int, q: int) -> None:
    """Rule out ways that break a cap or join twins; the way as it is stays allowed."""
    member, capped = deals.member[layer], state.cap[layer] < np.inf
    for i in range(2 * deals.m):
        e = member[i]
        if state.twin[layer, e] >= 0:
            other = q if deals.side[layer, i] else p
            for at in range(state.first[other], state.first[other + 1]):
                if state.twin[layer, state.occupant[layer, at]] == state.twin[layer, e]:
                    for s in range(len(deals.low)):
                        if _to_p(deals, s, i) != deals.side[layer, i]:
                            deals.own[layer, s] = -np.inf
    if capped:
        for s in range(len(deals.low)):
            more = 0.0
            for i in range(2 * deals.m):
                more += state.load[layer, member[i]] * (_to_p(deals, s, i) - deals.side[layer, i])
            if state.held[layer, p] + more > state.cap[layer] or state.held[layer, q] - more > state.cap[layer]:
                deals.own[layer, s] = -np.inf


@compiled
def _links(deals: Deals, layer: int, low: Floats, high: Floats) -> None:
    """What members of the next layer gain on p by subsets of this one's on p: `low` and `high` `[2^m, K]`."""
    m = deals.m
    low[0], high[0] = 0.0, 0.0
    for i in range(m):
        for x in range(2**i):
            for j in range(2 * m):
                low[2**i + x, j] = low[x, j] + 2 * deals.link[layer, i, j]
                high[2**i + x, j] = high[x, j] + 2 * deals.link[layer, m + i, j]


@compiled
def _sum_over(deals: Deals, layer: int, temperature: float) -> None:
    """The message of the next layer: temperature x log of the sum over the ways of this one."""
    m, subsets, ways = deals.m, 2**deals.m, len(deals.low)
    low, high, row = np.empty((subsets, 2 * m)), np.empty((subsets, 2 * m)), np.empty(2 * m)
    _links(deals, layer, low, high)
    factor_low, factor_high = np.empty(subsets), np.empty(subsets)
    total, shift = np.zeros(ways), -np.inf
    for s in range(ways):
        centre, top = 0.0, 0.0
        for j in range(2 * m):
            row[j] = (low[deals.low[s], j] + high[deals.high[s], j]) / temperature
            centre += row[j] / (2 * m)
        for j in range(2 * m):
            row[j] = min(max(row[j] - centre, -STEEPEST), STEEPEST)
            top += max(row[j], 0.0)
        base = deals.message[layer, s] / temperature + m * centre  # a way deals m members to p
        if base + top <= shift - NEVER:
            continue
        if base > shift:
            total *= np.exp(shift - base)
            shift = base
        for j in range(2 * m):
            row[j] = np.exp(row[j])
        _subset_products(row[:m], factor_low)
        _subset_products(row[m:], factor_high)
        factor_low *= np.exp(base - shift)
        for t in range(ways):
            total[t] += factor_low[deals.low[t]] * factor_high[deals.high[t]]
    for t in range(ways):
        log = np.log(total[t]) + shift if total[t] > 0 else -np.inf
        deals.message[layer + 1, t] = temperature * log + deals.own[layer + 1, t]


@compiled
def _subset_products(values: Floats, products: Floats) -> None:
    """The products over all subsets of `values`, subset x by its bits."""
    products[0] = 1.0
    for i in range(len(values)):
        for x in range(2**i):
            products[2**i + x] = products[x] * values[i]


@compiled
def _best_over(deals: Deals, layer: int) -> None:
    """The message of the next layer: the best over the ways of this one, which is kept in `back`."""
    m, subsets, ways = deals.m, 2**deals.m, len(deals.low)
    low, high = np.empty((subsets, 2 * m)), np.empty((subsets, 2 * m))
    _links(deals, layer, low, high)
    row, sums_low, sums_high = np.empty(2 * m), np.empty(subsets), np.empty(subsets)
    best, back = deals.message[layer + 1], deals.back[layer + 1]
    best[:] = -np.inf
    for s in range(ways):
        base = deals.message[layer, s]
        for j in range(2 * m):
            row[j] = low[deals.low[s], j] + high[deals.high[s], j]
        _subset_sums(row[:m], sums_low)
        _subset_sums(row[m:], sums_high)
        for t in range(ways):
            value = base + sums_low[deals.low[t]] + sums_high[deals.high[t]]
            if value > best[t]:
                best[t], back[t] = value, s
    for t in range(ways):
        best[t] += deals.own[layer + 1, t]


@compiled
def _drawn(value: Floats, temperature: float, seed: NDArray[np.uint64]) -> int:
    """A way drawn by its value, the best at temperature 0."""
    best = int(np.argmax(value))
    if temperature <= 0:
        return best
    top, total = value[best], 0.0
    for s in range(len(value)):
        total += np.exp((value[s] - top) / temperature)
    left = _unit(seed) * total
    for s in range(len(value)):
        left -= np.exp((value[s] - top) / temperature)
        if left < 0:
            return s
    return best


@compiled
def _drawn_before(deals: Deals, layer: int, way: int, temperature: float, seed: NDArray[np.uint64]) -> int:
    """The way of the layer before, drawn given that of a layer."""
    m = deals.m
    row, low, high = np.zeros(2 * m), np.empty(2**m), np.empty(2**m)
    for j in range(2 * m):
        if _to_p(deals, way, j):
            for i in range(2 * m):
                row[i] += 2 * deals.link[layer - 1, i, j]
    _subset_sums(row[:m], low)
    _subset_sums(row[m:], high)
    value = np.empty(len(deals.low))
    for s in range(len(value)):
        value[s] = deals.message[layer - 1, s] + low[deals.low[s]] + high[deals.high[s]]
    return _drawn(value, temperature, seed)


@compiled
def _deal(state: State, deals: Deals, layer: int, way: int) -> None:
    """Carry out a way by swaps."""
    j = 0
    for i in range(2 * deals.m):
        if deals.side[layer, i] > 0 and not _to_p(deals, way, i):
            while deals.side[layer, j] > 0 or not _to_p(deals, way, j):
                j += 1
            swap(state, layer, deals.member[layer, i], deals.member[layer, j])
            j += 1


@compiled
def _add(weight: Pulls, row: Pulls) -> None:
    for e in range(len(row)):
        row[e] += weight[e]


@compiled
def _shift(weight_a: Pulls, weight_b: Pulls, pull: Pulls, p: int, q: int) -> None:
    """Move the pulls of an expert from p to q and of another from q to p."""
    pull_p, pull_q = pull[p], pull[q]
    for e in range(len(weight_a)):
        moved = weight_a[e] - weight_b[e]
        pull_q[e] += moved
        pull_p[e] -= moved


@compiled
def _below(seed: NDArray[np.uint64], end: int) -> int:
    """A random integer in `[0, end)`, `end` below 2^32 (Marsaglia's xorshift)."""
    x = seed[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    seed[0] = x
    return int(np.int64(((x >> np.uint64(32)) * np.uint64(end)) >> np.uint64(32)))


@compiled
def _unit(seed: NDArray[np.uint64]) -> float:
    """A random number in `[0, 1)`."""
    return _below(seed, 2**32 - 1) / (2**32 - 1)
