"""The different rows of a table, and how many different values a column has.

Legend: R rows; G different ones; B columns.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Distinct", "distinct_rows"]

MIN_PENDING = 2**16


def distinct_rows(table_RB: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The different rows `[G, B]`, ascending, and which of them each row is, `[R]`; without columns all are alike."""
    if not table_RB.shape[1]:
        return table_RB[:1], np.zeros(len(table_RB), np.intp)
    order = np.lexsort(table_RB.T[::-1])
    sorted_RB = table_RB[order]
    is_new_R = np.ones(len(order), np.bool_)
    is_new_R[1:] = (sorted_RB[1:] != sorted_RB[:-1]).any(1)
    place_R = np.empty(len(order), np.intp)
    place_R[order] = is_new_R.cumsum() - 1
    return sorted_RB[is_new_R], place_R


class Distinct:
    """The set of the values added, in time that grows with their number whatever their order.

    What is added waits until there is as much of it as of what is known: each value is sorted a few times only.
    """

    def __init__(self) -> None:
        self._known: NDArray[np.int64] = np.zeros(0, np.int64)
        self._pending: list[NDArray[np.int64]] = []
        self._num_pending = 0

    def add(self, values: NDArray[np.int32 | np.int64]) -> None:
        """Take values; repetitions in a row, which is how samples and steps come, cost next to nothing."""
        changed = np.flatnonzero(values[1:] != values[:-1]) + 1
        kept = np.concatenate([values[:1], values[changed]]).astype(np.int64)
        self._pending.append(kept)
        self._num_pending += len(kept)
        if self._num_pending > max(MIN_PENDING, len(self._known)):
            self._merge()

    def __len__(self) -> int:
        self._merge()
        return len(self._known)

    def _merge(self) -> None:
        self._known = np.unique(np.concatenate([self._known, *self._pending]))
        self._pending, self._num_pending = [], 0
