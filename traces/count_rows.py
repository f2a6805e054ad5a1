"""Counts added up by their keys in bounded memory.

Legend: R rows; G rows of different keys; B columns of a key.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .distinct import distinct_rows

__all__ = ["CountRows"]

MAX_BYTES = 64 * 2**20
Keyed = tuple[NDArray[np.int64], NDArray[np.int64]]


class CountRows:
    """A table of distinct rows that comes out, and begins anew, whenever 64 MiB are full.

    Parameters
    ----------
    width
        B, the columns of a key.
    shape
        Of the counts of a row.

    Attributes
    ----------
    most
        Rows it holds at most.
    """

    def __init__(self, width: int, shape: tuple[int, ...]) -> None:
        self.most = max(1, MAX_BYTES // (8 * max(1, int(np.prod(shape)))))
        self._width = width
        self._row_of_key: dict[tuple[int, ...], int] = {}
        self._table = np.zeros((self.most, *shape), np.int64)

    def add(self, keys_RB: NDArray[np.int64], counts: NDArray[np.int64], *cell: NDArray[np.integer]) -> Iterator[Keyed]:
        """Add rows of counts `[R, ...]`, or counts `[R]` at these indices into a row; what makes room comes out."""
        keys_GB, row_R = distinct_rows(keys_RB)
        for first in range(0, len(keys_GB), self.most):
            keys = list(map(tuple, keys_GB[first : first + self.most].tolist()))
            if len(self._row_of_key.keys() | keys) > self.most:
                yield self.taken()
            slots = np.array([self._row_of_key.setdefault(key, len(self._row_of_key)) for key in keys], np.intp)
            whole = len(keys) == len(keys_GB)
            inside = slice(None) if whole else np.flatnonzero((row_R >= first) & (row_R < first + len(keys)))
            slot_R = slots[row_R[inside] - first]
            if not cell and len(slot_R) == len(slots):
                self._table[slot_R] += counts[inside]
            else:
                np.add.at(self._table, (slot_R, *(index[inside] for index in cell)), counts[inside])

    def taken(self) -> Keyed:
        """The keys `[G, B]` there are, ascending, and their counts `[G, ...]`; it is empty afterwards."""
        held = np.array(list(self._row_of_key), np.int64).reshape(len(self._row_of_key), self._width)
        keys_GB, place = distinct_rows(held)
        counts = self._table[np.argsort(place)]
        self._row_of_key = {}
        self._table[:] = 0
        return keys_GB, counts
