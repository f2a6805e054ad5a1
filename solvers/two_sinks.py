"""The transportation problem with two sinks, which a partial sort solves.

Compiled: to be imported in the call that needs it.

Legend: I items.
"""

import numpy as np
from numpy.typing import NDArray

from .compiled import compiled

__all__ = ["two_sinks"]

Ints = NDArray[np.int64]


@compiled
def two_sinks(cost: Ints, capacity: Ints) -> Ints:
    """The sink, 0 or 1, of every item `[I]` at the least cost, and among equals the first in lexicographic order.

    Parameters
    ----------
    cost
        `[I, 2]`, differences that do not overflow.
    capacity
        The most items a sink takes, `[2]`, enough.

    Notes
    -----
    The items for which sink 1 is the greatest gain go there: all that gain, within the capacities, and of the last one
    and its equals the latest.
    """
    left = len(cost)
    dearer, sink, gains = np.empty(left, np.int64), np.zeros(left, np.int64), 0
    for i in range(left):
        dearer[i] = cost[i, 1] - cost[i, 0]
        gains += dearer[i] < 0
    moved = min(max(gains, left - capacity[0]), capacity[1])
    if moved == 0:
        return sink
    last = _selected(dearer.copy(), moved - 1)
    for i in range(left):
        sink[i] = dearer[i] < last
        moved -= sink[i]
    while moved:
        left -= 1
        if dearer[left] == last:
            sink[left] = 1
            moved -= 1
    return sink


@compiled
def _selected(values: Ints, place: int) -> int:
    """Value at this place in sorted order, by Hoare's quickselect. The values are rearranged."""
    low, high = 0, len(values) - 1
    while low < high:
        middle, i, j = values[low + (high - low) * 5 // 8], low, high
        while i <= j:
            while values[i] < middle:
                i += 1
            while values[j] > middle:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if j < place < i:
            break
        low, high = (low, j) if place <= j else (i, high)
    return int(values[place])
