"""Rows of the count form, added up by their keys in bounded memory.

Legend: R rows; E experts; B columns that tell rows apart, the last of which is the layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .count_form import CountTable, CountTrace
from .schema import KEYS, Key

__all__ = ["CountRows", "condense"]

MAX_BYTES = 64 * 2**20


class CountRows:
    """A table of distinct rows that comes out, and begins anew, whenever 64 MiB are full.

    Attributes
    ----------
    most
        Rows it holds at most.
    """

    def __init__(self, keys: Sequence[Key], num_experts: int) -> None:
        self.most = max(1, MAX_BYTES // (8 * num_experts))
        self._names = (*keys, "layer")
        self._row_of_key: dict[tuple[int, ...], int] = {}
        self._table = np.zeros((self.most, num_experts), np.int64)

    def add(self, keys_RB: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Iterator[CountTable]:
        """Add rows, the columns of their keys in the order given; what had to make room comes out."""
        for first in range(0, len(keys_RB), self.most):
            piece = slice(first, first + self.most)
            distinct, place_R = np.unique(keys_RB[piece], axis=0, return_inverse=True)
            keys = list(map(tuple, distinct.tolist()))
            if len(self._row_of_key.keys() | keys) > self.most:
                yield self.taken()
            slots = [self._row_of_key.setdefault(key, len(self._row_of_key)) for key in keys]
            np.add.at(self._table, np.array(slots, np.intp)[place_R.reshape(-1)], counts_RE[piece])

    def taken(self) -> CountTable:
        """The rows there are, in the order of their keys; it is empty afterwards."""
        keys = np.array(list(self._row_of_key), np.int64).reshape(-1, len(self._names))
        order = np.lexsort(keys.T[::-1])
        columns: dict[str, Any] = {
            name: keys[order, column].astype(np.int64 if name == "sample" else np.int32)
            for column, name in enumerate(self._names)
        }
        table = CountTable(**columns, counts=self._table[order])
        self._row_of_key = {}
        self._table[:] = 0
        return table


def condense(trace: CountTrace) -> Iterator[CountTable]:
    """The tables of a trace in count form with rows of equal keys added up, as far as memory reaches."""
    keys = tuple(key for key in KEYS if key in trace.known)
    rows = CountRows(keys, trace.meta.model.num_experts)
    for table in trace.tables():
        columns = [getattr(table, name) for name in (*keys, "layer")]
        yield from rows.add(np.stack(columns, axis=1).astype(np.int64), table.counts)
    yield rows.taken()
