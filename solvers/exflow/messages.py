"""Deals of the experts of two devices as a chain through the layers, compiled: weights summed up, then drawn.

A layer has few ways to deal K experts to two devices and meets its neighbours only, so that the weights of all chains
of deals sum up layer by layer, and a chain is drawn backwards from the Boltzmann distribution: exact where swaps one by
one would have to climb. At temperature 0 it is the best chain.

To be imported in the call that needs it; after changing `draws`, delete numba's cache.

Legend: L MoE layers; K = 2 m experts dealt a layer, m of them to device p; W ways to deal by the bits of `low` (first m
experts) and `high`; X = 2^m subsets of either half.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Floats, Ints
from ..compiled import compiled, inlined
from ..draws import exponential, unit

LANES = 8  # ways that a loop takes at once, at most
NEVER = 650.0  # ways so many temperatures below the best are not summed
LEAST = 30.0  # what is so many temperatures below the rest of a sum is nothing


class Deals(NamedTuple):
    """The ways to deal 2 m experts, m to each of two devices, and room to work in.

    Way s gives the experts of the bits of `low[s]` and `high[s]` to p, way W - 1 - s all others. Of each layer: the
    experts dealt, which of them are on p, what every way is worth beside its links, what it is worth with all that come
    before it, and the way drawn.

    `member, side [L, K]; own, message, back [L, W]; way [L]; swaps [L m, 3]; link [L-1, K, K]; bits, spin, factor
    [K, W']; base [W']; product [2, X, W']`, where `spin` is 1 for the bits that are set and -1 for others, and W' is W
    rounded up for loops over several ways at once: beyond W, `bits`, `spin` and `product[0, 0]` are 0.
    """

    m: int
    low: Ints
    high: Ints
    member: Ints
    side: Floats
    own: Floats
    message: Floats
    back: NDArray[np.int32]
    way: Ints
    swaps: Ints
    link: Floats
    bits: Floats
    spin: Floats
    base: Floats
    factor: Floats
    product: Floats


def deals_of(m: int, num_layers: int) -> Deals:
    """The ways to deal 2 m experts of every layer."""
    size = np.array([bin(x).count("1") for x in range(2**m)])
    low, high = np.nonzero(size[:, None] + size == m)
    ways, padded = len(low), -(-len(low) // LANES) * LANES
    bits, spin, product = np.zeros((2 * m, padded)), np.zeros((2 * m, padded)), np.zeros((2, 2**m, padded))
    bits[:, :ways] = [half >> i & 1 for half in (low, high) for i in range(m)]
    spin[:, :ways] = 2 * bits[:, :ways] - 1
    product[1, 0] = 1.0  # stays; no way is beyond W, where product[0, 0] stays 0
    return Deals(
        m=m,
        low=low,
        high=high,
        member=np.zeros((num_layers, 2 * m), np.int64),
        side=np.zeros((num_layers, 2 * m)),
        own=np.zeros((num_layers, ways)),
        message=np.zeros((num_layers, ways)),
        back=np.zeros((num_layers, ways), np.int32),
        way=np.zeros(num_layers, np.int64),
        swaps=np.zeros((num_layers * m, 3), np.int64),
        link=np.zeros((max(num_layers - 1, 0), 2 * m, 2 * m)),
        bits=bits,
        spin=spin,
        base=np.zeros(padded),
        factor=np.zeros((2 * m, padded)),
        product=product,
    )


@compiled
def sum_over(deals: Deals, temperature: float, mirrored: bool) -> int:
    """The messages of all layers: temperature x log of the sum over the ways of the layer before.

    Parameters
    ----------
    mirrored
        Whether the devices might trade names: ways s and W - 1 - s are worth the same, and one is summed for both.

    Returns
    -------
    int
        Pairs of ways of neighbouring layers that were summed one by one, which takes longer.

    Notes
    -----
    A pair of members is worth half its link where both are on one device and as much less where not. With g[s, j] what
    member j of the next layer gains on p by way s of this one, over the temperature,

        sum_s exp(message[s] / temperature) prod_{j in t} exp(g[s, j])        for every way t.

    Loops run along s, where there are many.
    """
    own, base, ways, steep = deals.own, deals.base, len(deals.low), 0
    for layer in range(len(own) - 1):
        here, message = deals.message[layer], deals.message[layer + 1]
        summed = message[: ways // 2] if mirrored else message
        _gains(deals.link[layer], deals.spin, deals.factor, 1 / temperature)
        for s in range(ways):
            base[s] = here[s] / temperature
        # Steep: a way that products leave away may gain as much as the best.
        if 2 * deals.m * _steepest(deals.link[layer], 1 / temperature) > NEVER - LEAST:
            steep += ways * len(summed)
            _sum_ways(deals, summed)
        else:
            _sum_products(deals, summed)
        for t in range(len(summed), ways):
            message[t] = message[ways - 1 - t]
        for t in range(ways):
            message[t] = temperature * message[t] + own[layer + 1, t]
    return steep


@compiled
def _steepest(link: Floats, scale: float) -> float:
    """A bound on what any member of the next layer gains or loses: as if with all of this layer."""
    most = 0.0
    for j in range(len(link)):
        total = 0.0
        for i in range(len(link)):
            total += abs(link[i, j] - link[i].mean())
        most = max(most, total)
    return scale * most


@inlined
def _sum_products(deals: Deals, message: Floats) -> None:
    """The log of the sum over the ways, by products of the exponentials of what members gain."""
    base, factor, shift, ways = deals.base, deals.factor, -np.inf, len(deals.low)
    for s in range(ways):
        shift = max(shift, base[s])
    for s in range(ways):
        deals.product[0, 0, s] = _weight(base[s] - shift)
    for j in range(2 * deals.m):
        for s in range(len(base)):
            factor[j, s] = exponential(factor[j, s])
    _multiply(deals.m, deals.product, factor)
    _dots(deals.product, deals.low, deals.high, message)
    for t in range(len(message)):
        message[t] = np.log(message[t]) + shift


@inlined
def _sum_ways(deals: Deals, message: Floats) -> None:
    """The log of the sum over the ways, by the exponential of each; takes longer."""
    sums = deals.product
    sums[0, 0], sums[1, 0] = deals.base, 0.0
    _add(deals.m, sums, deals.factor)
    for t in range(len(message)):
        message[t] = _log_sum(sums[0, deals.low[t]], sums[1, deals.high[t]], len(deals.low))
    sums[0, 0], sums[1, 0] = 0.0, 1.0


@partial(compiled, any_order=True)
def _log_sum(one: Floats, other: Floats, size: int) -> float:
    """Log sum exp(one + other), of the first `size`."""
    best, total = -np.inf, 0.0
    for s in range(size):
        best = max(best, one[s] + other[s])
    if best == -np.inf:  # none is allowed
        return best
    for s in range(size):
        total += exponential(max(one[s] + other[s] - best, -NEVER))
    return float(np.log(total) + best)


@compiled
def _weight(below: float) -> float:
    """The exponential of what a way is worth below the best, `below <= 0`; cut off without a branch."""
    return exponential(max(below, -NEVER)) if below > -NEVER else 0.0


@compiled
def _gains(link: Floats, spin: Floats, factor: Floats, scale: float) -> None:
    """Gain of every member of the next layer on p, for way s of this layer.

    factor[j, s] = scale sum_i (link[i, j] - mean_i) spin[i, s]    with mean_i the mean of link[i] over j

    The spins of a way add up to nothing, so that a mean over j is worth nothing, whatever the way of the next layer.
    Without it the gains of all j add up to nothing, and half the sum over spins, for which a link counts, is the sum
    over the members on p. Two members at a time, for half as many passes over `factor`.
    """
    factor[:] = 0.0
    for i in range(0, len(link), 2):
        one, other = link[i].mean(), link[i + 1].mean()
        for j in range(len(link)):
            here, there = scale * (link[i, j] - one), scale * (link[i + 1, j] - other)
            for s in range(spin.shape[1]):
                factor[j, s] += here * spin[i, s] + there * spin[i + 1, s]


@compiled
def _multiply(m: int, product: Floats, factor: Floats) -> None:
    """The products of the factors of every subset of either half."""
    for half in range(2):
        for i in range(m):
            for x in range(1 << i):
                known, more, new = product[half, x], factor[half * m + i], product[half, x | 1 << i]
                for s in range(len(new)):
                    new[s] = known[s] * more[s]


@compiled
def _add(m: int, sums: Floats, gain: Floats) -> None:
    """The sums of what every subset of either half gains."""
    for half in range(2):
        for i in range(m):
            for x in range(1 << i):
                known, more, new = sums[half, x], gain[half * m + i], sums[half, x | 1 << i]
                for s in range(len(new)):
                    new[s] = known[s] + more[s]


@partial(compiled, any_order=True)
def _dots(product: Floats, low: Ints, high: Ints, dots: Floats) -> None:
    """dots[t] = sum_s product[0, low[t], s] product[1, high[t], s]."""
    for t in range(len(dots)):
        x, y, total = low[t], high[t], 0.0
        for s in range(product.shape[2]):
            total += product[0, x, s] * product[1, y, s]
        dots[t] = total


@compiled
def best_over(deals: Deals) -> None:
    """The messages of all layers: the best over the ways of the layer before, which is kept in `back`."""
    factor, bits, own, value = deals.factor, deals.bits, deals.own, deals.base
    for layer in range(len(own) - 1):
        best, back = deals.message[layer + 1], deals.back[layer + 1]
        _gains(deals.link[layer], deals.spin, factor, 1.0)
        best[:] = -np.inf
        for s in range(len(best)):
            value[:] = deals.message[layer, s]
            for j in range(2 * deals.m):
                for t in range(len(value)):
                    value[t] += factor[j, s] * bits[j, t]
            for t in range(len(best)):
                if value[t] > best[t]:
                    best[t], back[t] = value[t], s
        for t in range(len(best)):
            best[t] += own[layer + 1, t]


@compiled
def draw(deals: Deals, temperature: float, mirrored: bool, seed: NDArray[np.uint64]) -> None:
    """Draw a way of every layer given that of the next, from the last to the first; the best at temperature 0.

    Where devices might trade names they do if fewer experts of the last layer move then, so that what is
    drawn is a deal up to names.
    """
    way, link, message, last = deals.way, deals.link, deals.message, len(deals.way) - 1
    bits, spin = deals.bits, deals.spin
    value = deals.base[: len(deals.low)]
    value[:] = message[last]
    way[last] = _drawn(value, temperature, seed)
    if mirrored and 2 * (deals.side[last] > bits[:, way[last]]).sum() > deals.m:
        way[last] = len(deals.low) - 1 - way[last]
    for layer in range(last - 1, -1, -1):
        if temperature > 0:
            value[:] = message[layer]
            for i in range(2 * deals.m):
                gain = 0.0
                for j in range(2 * deals.m):
                    gain += link[layer, i, j] * spin[j, way[layer + 1]]
                for s in range(len(value)):
                    value[s] += gain * bits[i, s]
            way[layer] = _drawn(value, temperature, seed)
        else:
            way[layer] = deals.back[layer + 1, way[layer + 1]]


@compiled
def _drawn(value: Floats, temperature: float, seed: NDArray[np.uint64]) -> int:
    """A way drawn by its value, which is overwritten; the best at temperature 0."""
    best = int(np.argmax(value))
    if temperature <= 0:
        return best
    top, total = value[best], 0.0
    for s in range(len(value)):
        value[s] = _weight((value[s] - top) / temperature)
        total += value[s]
    left = unit(seed) * total
    for s in range(len(value)):
        left -= value[s]
        if left < 0:
            return s
    return best
