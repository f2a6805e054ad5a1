"""Random numbers and exponentials, compiled.

To be imported in the call that needs it.
"""

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled

SEED = 0x9E3779B97F4A7C15  # from which kernels draw


@compiled
def below(seed: NDArray[np.uint64], end: int) -> int:
    """A random integer in `[0, end)`, `end` below 2^32 (Marsaglia's xorshift)."""
    x = seed[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    seed[0] = x
    return int(np.int64(((x >> np.uint64(32)) * np.uint64(end)) >> np.uint64(32)))


@compiled
def unit(seed: NDArray[np.uint64]) -> float:
    """A random number in `[0, 1)`."""
    return below(seed, 2**32 - 1) / (2**32 - 1)


@compiled
def exponential(x: float) -> float:
    """exp(x) for |x| up to 700, to 1e-8 of it: 2^k times a polynomial, which a loop computes for several x at once."""
    k = np.floor(x * 1.4426950408889634 + 0.5)
    f = x - k * 0.6931471805599453
    tail = f * (1 / 24 + f * (1 / 120 + f * (1 / 720 + f / 5040)))
    power = np.int64((np.int64(k) + 1023) << 52).view(np.float64)
    return float((1.0 + f * (1.0 + f * (0.5 + f * (1 / 6 + tail)))) * power)
