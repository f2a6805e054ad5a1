"""The transportation problem with two sinks, which a partial sort solves.

Legend: I items.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["two_sinks"]


def two_sinks(cost: NDArray[Any], capacity: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sink, 0 or 1, of every item `[I]` at the least cost, and among equals the first in lexicographic order.

    Parameters
    ----------
    cost
        `[I, 2]`.
    capacity
        The most items a sink takes, `[2]`, enough.

    Notes
    -----
    The items for which sink 1 is the greatest gain go there: all that gain, within the capacities, and of the last one
    and its equals the latest.
    """
    dearer_I = cost[:, 1] - cost[:, 0]
    moved = min(max(int(np.count_nonzero(dearer_I < 0)), len(cost) - int(capacity[0])), int(capacity[1]))
    if moved == 0:
        return np.zeros(len(cost), dtype=np.int64)
    last = np.partition(dearer_I, moved - 1)[moved - 1]
    sink_I: NDArray[np.int64] = (dearer_I < last).astype(np.int64)
    sink_I[np.flatnonzero(dearer_I == last)[int(np.count_nonzero(sink_I)) - moved :]] = 1
    return sink_I
