"""Deals of the experts of two devices as a chain through the layers, compiled: weights summed up, then drawn.

A layer has few ways to deal K experts to two devices and meets its neighbours only, so that the weights of all chains
of deals sum up layer by layer, and a chain is drawn backwards from the Boltzmann distribution: exact where swaps one by
one would have to climb. At temperature 0 it is the best chain.

To be imported in the call that needs it.

Legend: L MoE layers; K = 2 m experts dealt a layer, m of them to device p; W ways to deal by the bits of `low` (first m
experts) and `high`; X = 2^m subsets of either half.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled, inlined
from ..draws import exponential, unit

__all__ = ["Deals", "best_over", "deals_of", "drawn", "drawn_before", "sum_over"]

LANES = 8  # ways that a loop takes at once, at most
NEVER = 650.0  # ways so many temperatures below the best are not summed
LEAST = 30.0  # what is so many temperatures below the rest of a sum is nothing
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Deals(NamedTuple):
    """The ways to deal 2 m experts, m to each of two devices, and room to work in.

    Way s gives the experts of the bits of `low[s]` and `high[s]` to p. Of each layer: the experts dealt, which of them
    are on p, what every way is worth beside its links, and what it is worth with all that come before it.

    `member, side [L, K]; own, message, back [L, W]; link [L-1, K, K]; bits, factor [K, W']; base [W']; product
    [2, X, W']`, where `bits` are those of the ways, and W' is W rounded up for loops over several ways at once: what is
    beyond W weighs nothing.
    """

    m: int
    low: Ints
    high: Ints
    member: Ints
    side: Floats
    own: Floats
    message: Floats
    back: NDArray[np.int32]
    link: Floats
    bits: Floats
    base: Floats
    factor: Floats
    product: Floats


def deals_of(m: int, num_layers: int) -> Deals:
    """The ways to deal 2 m experts of every layer."""
    size = np.array([bin(x).count("1") for x in range(2**m)])
    low, high = np.nonzero(size[:, None] + size == m)
    ways, padded = len(low), -(-len(low) // LANES) * LANES
    bits, product = np.zeros((2 * m, padded)), np.zeros((2, 2**m, padded))
    bits[:, :ways] = [half >> i & 1 for half in (low, high) for i in range(m)]
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
        link=np.zeros((max(num_layers - 1, 0), 2 * m, 2 * m)),
        bits=bits,
        base=np.zeros(padded),
        factor=np.zeros((2 * m, padded)),
        product=product,
    )


@inlined
def sum_over(deals: Deals, layer: int, temperature: float) -> bool:
    """The message of the next layer: temperature x log of the sum over the ways of this one; whether it was steep.

    Notes
    -----
    With g[s, j] what member j of the next layer gains on p by way s of this one, over the temperature,

        sum_s exp(message[s] / temperature) prod_{j in t} exp(g[s, j])        for every way t.

    Every way t has m members on p, so that a mean over j can be taken out of g[s] and m times it put to the message.
    Loops run along s, where there are many.
    """
    base, factor, message, steepest = deals.base, deals.factor, deals.message[layer + 1], 0.0
    _gains(deals, layer, 2 / temperature)
    for s in range(len(message)):
        base[s] += deals.message[layer, s] / temperature
    for j in range(2 * deals.m):
        for s in range(len(message)):
            steepest = max(steepest, abs(factor[j, s]))
    steep = 2 * deals.m * steepest > NEVER - LEAST  # a way that products leave away may gain as much as the best
    if steep:
        _sum_ways(deals, message)
    else:
        _sum_products(deals, message)
    for t in range(len(message)):
        message[t] = temperature * message[t] + deals.own[layer + 1, t]
    return steep


@inlined
def _sum_products(deals: Deals, message: Floats) -> None:
    """The log of the sum over the ways, by products of the exponentials of what members gain."""
    base, factor, shift = deals.base, deals.factor, -np.inf
    for s in range(len(message)):
        shift = max(shift, base[s])
    for s in range(len(message)):
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
        message[t] = _log_sum(sums[0, deals.low[t]], sums[1, deals.high[t]], len(message))
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


@inlined
def _gains(deals: Deals, layer: int, scale: float) -> None:
    """What every member of the next layer gains on p by way s of this one, and m times the mean that is taken out.

    factor[j, s] = scale sum_i (link[i, j] - mean_i) bits[i, s]    with mean_i the mean of link[i] over j
    base[s] = m scale sum_i mean_i bits[i, s]

    Two members at a time, for half as many passes over `factor`.
    """
    factor, base, bits, link, size = deals.factor, deals.base, deals.bits, deals.link, 2 * deals.m
    factor[:] = 0.0
    base[:] = 0.0
    for i in range(0, size, 2):
        one, other = link[layer, i].mean(), link[layer, i + 1].mean()
        for s in range(len(base)):
            base[s] += deals.m * scale * (one * bits[i, s] + other * bits[i + 1, s])
        for j in range(size):
            here, there = scale * (link[layer, i, j] - one), scale * (link[layer, i + 1, j] - other)
            for s in range(len(base)):
                factor[j, s] += here * bits[i, s] + there * bits[i + 1, s]


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
    for t in range(len(low)):
        x, y, total = low[t], high[t], 0.0
        for s in range(product.shape[2]):
            total += product[0, x, s] * product[1, y, s]
        dots[t] = total


@inlined
def best_over(deals: Deals, layer: int) -> None:
    """The message of the next layer: the best over the ways of this one, which is kept in `back`."""
    base, factor, bits = deals.base, deals.factor, deals.bits
    best, back, value = deals.message[layer + 1], deals.back[layer + 1], np.empty(len(base))
    _gains(deals, layer, 2.0)
    best[:] = -np.inf
    for s in range(len(best)):
        value[:] = deals.message[layer, s] + base[s]
        for j in range(2 * deals.m):
            for t in range(len(value)):
                value[t] += factor[j, s] * bits[j, t]
        for t in range(len(best)):
            if value[t] > best[t]:
                best[t], back[t] = value[t], s
    for t in range(len(best)):
        best[t] += deals.own[layer + 1, t]


@compiled
def drawn(value: Floats, temperature: float, seed: NDArray[np.uint64]) -> int:
    """A way drawn by its value, the best at temperature 0."""
    best = int(np.argmax(value))
    if temperature <= 0:
        return best
    weight = np.empty(len(value))
    for s in range(len(value)):
        weight[s] = _weight((value[s] - value[best]) / temperature)
    left = unit(seed) * weight.sum()
    for s in range(len(value)):
        left -= weight[s]
        if left < 0:
            return s
    return best


@inlined
def drawn_before(deals: Deals, layer: int, way: int, temperature: float, seed: NDArray[np.uint64]) -> int:
    """The way of the layer before, drawn given that of a layer."""
    bits, link, value = deals.bits, deals.link, deals.message[layer - 1].copy()
    for i in range(2 * deals.m):
        gain = 0.0
        for j in range(2 * deals.m):
            gain += 2 * link[layer - 1, i, j] * bits[j, way]
        for s in range(len(value)):
            value[s] += gain * bits[i, s]
    return drawn(value, temperature, seed)
