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

from ..compiled import compiled
from ..draws import exponential, unit

__all__ = ["Deals", "best_over", "deals_of", "drawn", "drawn_before", "subset_sums", "sum_over", "to_p"]

STEEPEST = 150.0  # exponents are cut off there, so that products of four do not overflow
NEVER = 300.0  # ways so many temperatures below the best are not summed
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Deals(NamedTuple):
    """The ways to deal 2 m experts, m to each of two devices, and room to work in.

    Way s gives the experts of the bits of `low[s]` and `high[s]` to p. Of each layer: the experts dealt, which of them
    are on p, what every way is worth beside its links, and what it is worth with all that come before it.

    `member, side [L, K]; own, message, back [L, W]; link [L-1, K, K]; gain [2, K, X]; mean [2, X]; base [W];
    factor [K, W]; product [2, X, W]`.
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
    gain: Floats
    mean: Floats
    base: Floats
    factor: Floats
    product: Floats


def deals_of(m: int, num_layers: int) -> Deals:
    """The ways to deal 2 m experts of every layer."""
    size = np.array([bin(x).count("1") for x in range(2**m)])
    low, high = np.nonzero(size[:, None] + size == m)
    ways = len(low)
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
        gain=np.zeros((2, 2 * m, 2**m)),
        mean=np.zeros((2, 2**m)),
        base=np.zeros(ways),
        factor=np.zeros((2 * m, ways)),
        product=np.zeros((2, 2**m, ways)),
    )


@compiled
def to_p(deals: Deals, way: int, i: int) -> int:
    """Whether a way deals member i to p."""
    if i < deals.m:
        return int(deals.low[way] >> i & 1)
    return int(deals.high[way] >> (i - deals.m) & 1)


@compiled
def subset_sums(values: Floats, sums: Floats) -> None:
    """The sums over all subsets of `values`, subset x by its bits."""
    sums[0] = 0.0
    for i in range(len(values)):
        for x in range(2**i):
            sums[2**i + x] = sums[x] + values[i]


@compiled
def sum_over(deals: Deals, layer: int, temperature: float) -> None:
    """The message of the next layer: temperature x log of the sum over the ways of this one.

    Notes
    -----
    With g[s, j] what member j of the next layer gains on p by way s of this one, over the temperature,

        sum_s exp(message[s]) prod_{j in t} exp(g[s, j])        for every way t.

    Every way t has m members on p, so that a mean over j can be taken out of g[s] and m times it put to the message.
    Loops run along s, where there are many.
    """
    m, base, product, shift = deals.m, deals.base, deals.product, -np.inf
    _gains(deals, layer, 2 / temperature)
    for s in range(len(base)):
        mean = deals.mean[0, deals.low[s]] + deals.mean[1, deals.high[s]]
        base[s] = deals.message[layer, s] / temperature + m * mean
        shift = max(shift, base[s])
    for s in range(len(base)):
        below = base[s] - shift
        product[0, 0, s] = exponential(max(below, -NEVER)) if below > -NEVER else 0.0
        product[1, 0, s] = 1.0
    for j in range(2 * m):
        _factors(deals.gain[0, j], deals.gain[1, j], deals.low, deals.high, deals.factor[j])
    for i in range(m):
        for x in range(2**i):
            _multiply(product[0, x], deals.factor[i], product[0, 2**i + x])
            _multiply(product[1, x], deals.factor[m + i], product[1, 2**i + x])
    for t in range(len(base)):
        total = _dot(product[0, deals.low[t]], product[1, deals.high[t]])
        log = np.log(total) + shift if total > 0 else -np.inf
        deals.message[layer + 1, t] = temperature * log + deals.own[layer + 1, t]


@compiled
def _gains(deals: Deals, layer: int, scale: float) -> None:
    """By subsets of either half on p, what the members of the next layer gain there less the mean, and the mean."""
    m = deals.m
    for half in range(2):
        gain, mean = deals.gain[half], deals.mean[half]
        for i in range(m):
            link = deals.link[layer, half * m + i]
            centre = link.mean()
            for x in range(2**i):
                mean[2**i + x] = mean[x] + scale * centre
            for j in range(2 * m):
                for x in range(2**i):
                    gain[j, 2**i + x] = gain[j, x] + scale * (link[j] - centre)


@compiled
def _factors(gain_low: Floats, gain_high: Floats, low: Ints, high: Ints, factor: Floats) -> None:
    """The exponential of what a member gains by every way."""
    for s in range(len(factor)):
        factor[s] = gain_low[low[s]] + gain_high[high[s]]
    for s in range(len(factor)):
        factor[s] = exponential(min(max(factor[s], -STEEPEST), STEEPEST))


@compiled
def _multiply(a: Floats, b: Floats, product: Floats) -> None:
    for s in range(len(product)):
        product[s] = a[s] * b[s]


@partial(compiled, any_order=True)
def _dot(a: Floats, b: Floats) -> float:
    total = 0.0
    for s in range(len(a)):
        total += a[s] * b[s]
    return total


@compiled
def best_over(deals: Deals, layer: int) -> None:
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
        subset_sums(row[:m], sums_low)
        subset_sums(row[m:], sums_high)
        for t in range(ways):
            value = base + sums_low[deals.low[t]] + sums_high[deals.high[t]]
            if value > best[t]:
                best[t], back[t] = value, s
    for t in range(ways):
        best[t] += deals.own[layer + 1, t]


@compiled
def drawn(value: Floats, temperature: float, seed: NDArray[np.uint64]) -> int:
    """A way drawn by its value, the best at temperature 0."""
    best = int(np.argmax(value))
    if temperature <= 0:
        return best
    top, total = value[best], 0.0
    for s in range(len(value)):
        total += np.exp((value[s] - top) / temperature)
    left = unit(seed) * total
    for s in range(len(value)):
        left -= np.exp((value[s] - top) / temperature)
        if left < 0:
            return s
    return best


@compiled
def drawn_before(deals: Deals, layer: int, way: int, temperature: float, seed: NDArray[np.uint64]) -> int:
    """The way of the layer before, drawn given that of a layer."""
    m = deals.m
    row, low, high = np.zeros(2 * m), np.empty(2**m), np.empty(2**m)
    for j in range(2 * m):
        if to_p(deals, way, j):
            for i in range(2 * m):
                row[i] += 2 * deals.link[layer - 1, i, j]
    subset_sums(row[:m], low)
    subset_sums(row[m:], high)
    value = np.empty(len(deals.low))
    for s in range(len(value)):
        value[s] = deals.message[layer - 1, s] + low[deals.low[s]] + high[deals.high[s]]
    return drawn(value, temperature, seed)


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
