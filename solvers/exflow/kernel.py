"""Annealing by block moves, compiled: some experts of two devices are dealt anew over all layers at once (`messages`).

To be imported in the call that needs it.

Legend: L MoE layers; P places a layer, experts first and weightless ones behind; D devices; N nodes (0: one level);
K = 2 m experts dealt a layer, m of them to device p.
"""

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Ints
from ..compiled import compiled, inlined
from ..draws import below, unit
from .messages import Deals, best_over, draw, sum_over
from .state import Pulls, State, swap

TOURNAMENT = 2  # candidates a pick, times experts per device over those picked


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
        Pairs of ways that were summed one by one (`messages.sum_over`).
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
    With sigma[l, i] = 1 for members on p, else -1, the value is, up to a constant,

        sum_l own[l, s_l] + kappa / 2 sum_{l,i,j} W[l,i,j] sigma[l,i] sigma[l+1,j]

    own collects the pulls of everyone who stays, the pairs inside the layer, and forbids what the caps do not allow.
    Where nobody stays, two devices of one node might trade names.
    """
    nodes = state.node_pull.shape[1] > 0 and p // state.group != q // state.group
    mirrored = not (nodes or state.tied) and _all_dealt(state, deals, p) and _all_dealt(state, deals, q)
    kappa = state.worth[0] + (state.worth[1] if nodes else 0.0)
    _choose(state, deals, p, q, seed)
    _link(deals, state.after, kappa)
    if mirrored and not len(state.beside):
        deals.own[:] = 0.0
    else:
        _weigh(state, deals, p, q, kappa)
    if state.tied:
        _forbid(state, deals, p, q)
    deals.message[0] = deals.own[0]
    steep = 0
    if temperature > 0:
        steep = sum_over(deals, temperature, mirrored)
    else:
        best_over(deals)
    draw(deals, temperature, mirrored, seed)
    swap(state, _swaps(deals))
    return steep


@inlined
def _all_dealt(state: State, deals: Deals, device: int) -> bool:
    """Check whether no expert of a device stays as it is."""
    return bool(state.first[device + 1] - state.first[device] == deals.m)


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
    """Number of experts of each of two devices that can be dealt."""
    return int(min(state.first[p + 1] - state.first[p], state.first[q + 1] - state.first[q], most))


@compiled
def _choose(state: State, deals: Deals, p: int, q: int, seed: NDArray[np.uint64]) -> None:
    """Pick m experts of each device in every layer; of many, each is the most wished of a few random ones.

    What is wished for by turns is a pull of the other device, and links to those picked in the layer before: threads
    of experts that follow each other move only together.
    """
    m, first, occupant, score = deals.m, state.first, state.occupant, np.zeros(state.pull.shape[2])
    for layer in range(len(occupant)):
        threads = layer > 0 and below(seed, 2) > 0
        for side in range(2):
            here, there = (q, p) if side else (p, q)
            member, number = deals.member[layer, side * m : (side + 1) * m], first[here + 1] - first[here]
            deals.side[layer, side * m : (side + 1) * m] = 1.0 - side
            if number == m:
                member[:] = occupant[layer, first[here] : first[here + 1]]
            else:
                experts = occupant[layer, first[here] : first[here + 1]]
                _score(state, deals, layer, here, there, threads, score)
                for at in range(m):
                    member[at] = _pick(experts, score, member[:at], TOURNAMENT * number // m, seed)


@compiled
def _link(deals: Deals, after: Pulls, kappa: float) -> None:
    """Compute the worth of pairs of members of neighbouring layers on one device."""
    link, member = deals.link, deals.member
    for layer in range(len(link)):
        for i in range(2 * deals.m):
            for j in range(2 * deals.m):
                link[layer, i, j] = kappa * after[layer, member[layer, i], member[layer + 1, j]]


@compiled
def _score(state: State, deals: Deals, layer: int, here: int, there: int, threads: bool, score: Floats) -> None:
    """Score of each expert of a device: those of a high one are dealt."""
    for at in range(state.first[here], state.first[here + 1]):
        e = state.occupant[layer, at]
        score[e] = 0.0 if threads else state.pull[layer, there, e] - state.pull[layer, here, e]
        if threads:
            for i in deals.member[layer - 1]:
                score[e] += state.before[layer - 1, e, i]


@compiled
def _pick(experts: Ints, score: Floats, taken: Ints, draws: int, seed: NDArray[np.uint64]) -> int:
    """The most wished of a few random experts that are not taken."""
    best = -1
    while best < 0:
        for _ in range(draws):
            e = experts[below(seed, len(experts))]
            if (best < 0 or score[e] > score[best]) and e not in taken:
                best = e
    return best


@compiled
def _weigh(state: State, deals: Deals, p: int, q: int, kappa: float) -> None:
    """Compute the worth of each way to deal each layer, besides its links to the members of other layers."""
    size, link, side, own, bits, beside = 2 * deals.m, deals.link, deals.side, deals.own, deals.bits, state.beside
    pull, near, group = state.pull, state.node_pull, state.group
    own[:] = 0.0
    for layer in range(len(own)):
        member = deals.member[layer]
        for i in range(size):
            e = member[i]
            field = state.worth[0] * (pull[layer, p, e] - pull[layer, q, e])
            if near.shape[1]:
                field += state.worth[1] * (near[layer, p // group, e] - near[layer, q // group, e])
            for j in range(size):
                if layer > 0:
                    field -= link[layer - 1, j, i] * (2 * side[layer - 1, j] - 1)
                if layer + 1 < len(side):
                    field -= link[layer, i, j] * (2 * side[layer + 1, j] - 1)
                if len(beside):
                    field -= 2 * kappa * beside[layer, e, member[j]] * side[layer, j]
            for s in range(own.shape[1]):
                own[layer, s] += field * bits[i, s]
        if len(beside):
            for i in range(size):
                for j in range(i):
                    pair = 2 * kappa * beside[layer, member[i], member[j]]
                    for s in range(own.shape[1]):
                        own[layer, s] += pair * bits[i, s] * bits[j, s]


@compiled
def _forbid(state: State, deals: Deals, p: int, q: int) -> None:
    """Rule out ways that break a cap or join twins; the way as it is stays allowed."""
    twin, cap = state.twin, state.cap
    for layer in range(len(cap)):
        for e in deals.member[layer]:
            if twin[layer, e] >= 0:
                _part_twins(state, deals, layer, p, q)
                break
        if cap[layer] < np.inf:
            _keep_cap(state, deals, layer, p, q)


@inlined
def _part_twins(state: State, deals: Deals, layer: int, p: int, q: int) -> None:
    """Rule out ways that give a member to where its twin stays."""
    member = deals.member[layer]
    for i in range(2 * deals.m):
        e = member[i]
        if state.twin[layer, e] >= 0:
            other = q if deals.side[layer, i] else p
            for at in range(state.first[other], state.first[other + 1]):
                if state.twin[layer, state.occupant[layer, at]] == state.twin[layer, e]:
                    for s in range(len(deals.low)):
                        if deals.bits[i, s] != deals.side[layer, i]:
                            deals.own[layer, s] = -np.inf


@inlined
def _keep_cap(state: State, deals: Deals, layer: int, p: int, q: int) -> None:
    """Rule out ways that give either device more than it may hold."""
    member = deals.member[layer]
    for s in range(len(deals.low)):
        more = 0.0
        for i in range(2 * deals.m):
            more += state.load[layer, member[i]] * (deals.bits[i, s] - deals.side[layer, i])
        if state.held[layer, p] + more > state.cap[layer] or state.held[layer, q] - more > state.cap[layer]:
            deals.own[layer, s] = -np.inf


@compiled
def _swaps(deals: Deals) -> Ints:
    """The swaps `(layer, a, b)` that carry out the ways drawn."""
    side, bits, member, way, swaps, count = deals.side, deals.bits, deals.member, deals.way, deals.swaps, 0
    for layer in range(len(way)):
        j = 0
        for i in range(2 * deals.m):
            if side[layer, i] > bits[i, way[layer]]:
                while side[layer, j] >= bits[j, way[layer]]:
                    j += 1
                swaps[count] = layer, member[layer, i], member[layer, j]
                count, j = count + 1, j + 1
    return swaps[:count]
