"""How many different values a column has."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Distinct"]

MIN_PENDING = 2**16


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
