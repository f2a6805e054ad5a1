"""The ways to deal some experts of two devices anew, layer by layer.

Legend: L MoE layers; K = 2 m experts dealt a layer, m of them to device p; W ways to deal by the bits of `low` (first m
experts) and `high`; X = 2^m subsets of either half.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Deals", "deals_of"]

LANES = 8  # ways that a loop takes at once, at most
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
