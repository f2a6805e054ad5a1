"""How many tokens are enough: the share of the full gain that a placement from few tokens has on others.

Legend: T tokens; L MoE layers; E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moeplan.profilers.cluster import Cluster

from ...routing import Routing, drawn, markov, transitions
from .kept import NUM_LAYERS, Kept, exchange_s, in_order, nodes_of, placed

Array = np.ndarray
SIZES = (100, 300, 1_000, 3_000, 10_000, 30_000)
ENOUGH = 0.95  # of the full gain


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens to fit, in random order `[T, L]`; transitions `[L-1, E, E]` of all there are, and of those that judge."""

    ids: Array
    full: Array
    unseen: Array


@dataclass(frozen=True, slots=True)
class Point:
    """What so many tokens give: the share of the full gain in hops kept on GPUs, and the all-to-all's speed-up."""

    share: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class Learned:
    """A point of each size, and that of all tokens."""

    points: dict[int, Point]
    full: Point


def synthetic(num_experts: int, seed: int) -> Draw:
    """Tokens of a Markov chain; all there are is the chain itself, which judges."""
    rng = np.random.default_rng(seed)
    weights = markov(rng, NUM_LAYERS, num_experts)
    return Draw(drawn(rng, weights, SIZES[-1]), weights, weights)


def recorded(routing: Routing, seed: int) -> Draw:
    """Tokens of one half of the samples; those of the other half judge."""
    half = routing.half(seed)
    ids = np.random.default_rng(seed).permutation(routing.ids[half])
    return Draw(ids, routing.transitions(half), routing.transitions(~half))


def learned(draw: Draw, num_devices: int) -> Learned:
    """What each size gives of what all tokens do.

    Notes
    -----
    The gain, over experts in order, is that of placing over GPUs alone; the speed-up that of placing nodes first.
    """
    base = in_order(draw.full, num_devices)
    base_share, base_s = Kept.of(draw.unseen, base).device, exchange_s(draw.unseen, base)

    def gained(fit: Array) -> tuple[float, float]:
        alone, first = placed(fit, Cluster(1, num_devices)), placed(fit, nodes_of(num_devices))
        return Kept.of(draw.unseen, alone).device - base_share, base_s / exchange_s(draw.unseen, first)

    full, speed_up = gained(draw.full)
    sizes = [size for size in SIZES if size <= len(draw.ids)]
    gains = [gained(transitions(draw.ids[:size], draw.full.shape[1])) for size in sizes]
    points = {size: Point(gain / full, times) for size, (gain, times) in zip(sizes, gains, strict=True)}
    return Learned(points, Point(1.0, speed_up))


def enough(shares: Mapping[int, float], least: float = ENOUGH) -> int | None:
    """The smallest size from which on every share is at least `least`; None where even the largest is not."""
    found = None
    for size in sorted(shares, reverse=True):
        if shares[size] < least:
            break
        found = size
    return found
