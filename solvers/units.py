"""Costs as whole units, which every method adds and compares without rounding.

Compiled: to be imported in the call that needs it.

Legend: I items; N sinks.
"""

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled
from .ties import prices

__all__ = ["exponent", "fixed_point", "greatest", "settled"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MAGNITUDE, MANTISSA_BITS = 2**63 - 1, 52  # of a float's bits
ROUNDING = 8 * 2.0**-MANTISSA_BITS


@compiled
def greatest(cost: Ints) -> int:
    """The greatest magnitude in `[I, N]`, I and N at least 1; that of -2**63, which int64 lacks, as 2**63 - 1."""
    most = least = 0
    for value in cost.ravel():
        most, least = max(most, int(value)), min(least, int(value))
    return max(most, -max(least, -MAGNITUDE))


@compiled
def exponent(cost: Floats) -> int:
    """The least e with all of `[I, N]` below 2**e in magnitude, -1022 if it is less; 1025 where one is not finite."""
    most = 0
    for bits in cost.view(np.int64).ravel():
        most = max(most, int(bits) & MAGNITUDE)
    return (most >> MANTISSA_BITS) - 1022


@compiled
def fixed_point(cost: Floats, power: int) -> tuple[Ints, bool]:
    """The costs times 2**power, rounded to integers `[I, N]`, and whether nothing was rounded."""
    units, exact = np.empty(cost.shape, np.int64), True
    low, high = 2.0 ** (power // 2), 2.0 ** (power - power // 2)  # 2**power alone may overflow
    for i in range(cost.shape[0]):
        for n in range(cost.shape[1]):
            scaled = cost[i, n] * low * high
            rounded = np.rint(scaled)
            units[i, n] = rounded
            exact &= rounded == scaled
    return units, exact


@compiled
def settled(cost: Floats, power: int, capacity: Ints, sink: Ints) -> bool:
    """Whether the best assignment of the costs in fixed point is the best, up to the rounding of floats.

    Notes
    -----
    Rounding to units changes an item's move between sinks by at most one, an exchange between all N sinks by at most N.
    """
    low, high, most = 2.0 ** (power // 2), 2.0 ** (power - power // 2), 0.0
    for i in range(len(sink)):
        most = max(most, abs(cost[i, sink[i]] * low * high))
    rounding = ROUNDING * most
    return cost.shape[1] <= rounding or prices(cost * low * high, capacity, sink, rounding)[1]
