"""Annealing by block moves, compiled: some experts of two devices are dealt anew over all layers at once (`deals`).

To be imported in the call that needs it. numba renews what it cached of a function when that function's own file
changes, not that of one it calls: after changing `draws`, `pulls` or `deals`, delete the cache.

Legend: L MoE layers; P places a layer, experts first and weightless ones behind; D devices; N nodes (0: one level);
K = 2 m experts dealt a layer, m of them to device p.
"""

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled, inlined
from ..draws import below, unit
from .deals import Deals, best_over, drawn, drawn_before, sum_over
from .pulls import State, swap

__all__ = ["anneal", "descend", "resample"]

TOURNAMENT = 2  # candidates a pick, times experts a device over those picked


@compiled
def anneal(
    state: State, deals: tuple[Deals, ...], blocks: int, start: float, end: float, seed: NDArray[np.uint64]
) -> int:
    """Make `blocks` block moves between random devices, the temperature falling from `start` to `end`.

    Parameters
    ----------
    deals
        Of 1, 2, ... experts of each device; the widest that both devices fill is dealt.

    Returns
    -------
    int
        Pairs of ways of neighbouring layers that were summed one by one (`deals.sum_over`), which takes longer.
    """
    num_devices, steep = len(state.first) - 1, 0
    for block in range(blocks):
        p = below(seed, num_devices)
        q = _partner(state, p, seed)
        width = _width(state, p, q, len(deals))
        if width:
            temperature = start * (end / start) ** (block / blocks)
            steep += resample(state, deals[width - 1], p, q, temperature, seed)
    return steep


@compiled
def descend(state: State, deals: tuple[Deals, ...], device: int, seed: NDArray[np.uint64]) -> None:
    """Deal the experts of a device and of each later one at their best, one after the other."""
    for other in range(device + 1, len(state.first) - 1):
        width = _width(state, device, other, len(deals))
        if width:
            resample(state, deals[width - 1], device, other, 0.0, seed)


@compiled
def resample(state: State, deals: Deals, p: int, q: int, temperature: float, seed: NDArray[np.uint64]) -> int:
    """Deal m random experts of each of devices p and q anew in all layers; at temperature 0 at their best.

    Returns
    -------
    int
        Pairs of ways, as `anneal` counts them.

    Notes
    -----
    With sigma[l, i] = 1 for members on p, else 0, the value is, up to a constant,

        sum_l own[l, s_l] + kappa sum_{l,i,j} W[l,i,j] (2 sigma[l,i] sigma[l+1,j] - sigma[l,i] - sigma[l+1,j])

    own collects the pulls of everyone who stays, the pairs inside the layer, and forbids what the caps do not allow.
    """
    num_layers, steep = len(state.pull), 0
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
            steep += sum_over(deals, layer, temperature)
        else:
            best_over(deals, layer)
    way = drawn(deals.message[num_layers - 1], temperature, seed)
    for layer in range(num_layers - 1, -1, -1):
        before = way
        if layer > 0:
            before = drawn_before(deals, layer, way, temperature, seed) if temperature > 0 else deals.back[layer, way]
        _deal(state, deals, layer, way)
        way = before
    return steep * len(deals.low) ** 2


@compiled
def _partner(state: State, p: int, seed: NDArray[np.uint64]) -> int:
    """Another device, drawn by what pulls a random expert of p away; any where nothing does."""
    num_layers, num_devices, _ = state.pull.shape
    q = below(seed, num_devices - 1)
    if q >= p:
        q += 1
    if state.first[p] == state.first[p + 1]:
        return q
    layer = below(seed, num_layers)
    expert = state.occupant[layer, state.first[p] + below(seed, state.first[p + 1] - state.first[p])]
    total = 0.0
    for d in range(num_devices):
        if d != p:
            total += state.pull[layer, d, expert]
    left = unit(seed) * total
    for d in range(num_devices):
        if d != p:
            left -= state.pull[layer, d, expert]
            if left < 0:
                return d
    return q


@inlined
def _width(state: State, p: int, q: int, most: int) -> int:
    """How many experts of each of two devices can be dealt."""
    return int(min(state.first[p + 1] - state.first[p], state.first[q + 1] - state.first[q], most))


@inlined
def _choose(state: State, deals: Deals, layer: int, p: int, q: int, seed: NDArray[np.uint64]) -> None:
    """Pick m experts of each device; of many, each is the most wished of a few random ones.

    What is wished for by turns is a pull of the other device, and links to those picked in the layer before: threads
    of experts that follow each other move only together.
    """
    m, threads, score = deals.m, layer > 0 and below(seed, 2) > 0, np.zeros(state.pull.shape[2])
    for side in range(2):
        here, there = (q, p) if side else (p, q)
        experts = state.occupant[layer, state.first[here] : state.first[here + 1]]
        member = deals.member[layer, side * m : (side + 1) * m]
        deals.side[layer, side * m : (side + 1) * m] = 1.0 - side
        if len(experts) == m:
            member[:] = experts
        else:
            _score(state, deals, layer, here, there, threads, score)
            for at in range(m):
                member[at] = _pick(experts, score, member[:at], TOURNAMENT * len(experts) // m, seed)


@compiled
def _score(
    state: State, deals: Deals, layer: int, here: int, there: int, threads: bool, score: NDArray[np.float64]
) -> None:
    """How much it is wished that each expert of a device be dealt."""
    for at in range(state.first[here], state.first[here + 1]):
        e = state.occupant[layer, at]
        score[e] = 0.0 if threads else state.pull[layer, there, e] - state.pull[layer, here, e]
        if threads:
            for i in deals.member[layer - 1]:
                score[e] += state.before[layer - 1, e, i]


@compiled
def _pick(
    experts: NDArray[np.int64],
    score: NDArray[np.float64],
    taken: NDArray[np.int64],
    draws: int,
    seed: NDArray[np.uint64],
) -> int:
    """The most wished of a few random experts that are not taken."""
    best = -1
    while best < 0:
        for _ in range(draws):
            e = experts[below(seed, len(experts))]
            if (best < 0 or score[e] > score[best]) and e not in taken:
                best = e
    return best


@inlined
def _weigh(state: State, deals: Deals, layer: int, p: int, q: int, kappa: float) -> None:
    """What each way to deal a layer is worth besides its links to the members of other layers."""
    size, member, link, side, own = 2 * deals.m, deals.member[layer], deals.link, deals.side, deals.own
    own[layer] = 0.0
    for i in range(size):
        e = member[i]
        field = state.worth[0] * (state.pull[layer, p, e] - state.pull[layer, q, e])
        if state.node_pull.shape[1]:
            near = state.node_pull[layer]
            field += state.worth[1] * (near[p // state.group, e] - near[q // state.group, e])
        for j in range(size):
            if layer > 0:
                field -= 2 * link[layer - 1, j, i] * side[layer - 1, j]
            if layer + 1 < len(side):
                field -= 2 * link[layer, i, j] * side[layer + 1, j]
            if len(state.beside):
                field -= 2 * kappa * state.beside[layer, e, member[j]] * side[layer, j]
        for s in range(own.shape[1]):
            own[layer, s] += field * deals.bits[i, s]
    if len(state.beside):
        for i in range(size):
            for j in range(i):
                pair = 2 * kappa * state.beside[layer, member[i], member[j]]
                for s in range(own.shape[1]):
                    own[layer, s] += pair * deals.bits[i, s] * deals.bits[j, s]
    _forbid(state, deals, layer, p, q)


@inlined
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
                        if deals.bits[i, s] != deals.side[layer, i]:
                            deals.own[layer, s] = -np.inf
    if capped:
        for s in range(len(deals.low)):
            more = 0.0
            for i in range(2 * deals.m):
                more += state.load[layer, member[i]] * (deals.bits[i, s] - deals.side[layer, i])
            if state.held[layer, p] + more > state.cap[layer] or state.held[layer, q] - more > state.cap[layer]:
                deals.own[layer, s] = -np.inf


@inlined
def _deal(state: State, deals: Deals, layer: int, way: int) -> None:
    """Carry out a way by swaps."""
    side, bits, j = deals.side, deals.bits, 0
    for i in range(2 * deals.m):
        if side[layer, i] > bits[i, way]:
            while side[layer, j] >= bits[j, way]:
                j += 1
            swap(state, layer, deals.member[layer, i], deals.member[layer, j])
            j += 1
