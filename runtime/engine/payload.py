"""Rows of bytes: columns of several kinds side by side, so that one exchange carries them all.

Legend: n rows.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Kinds = tuple[tuple[int, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a row: the width and the element type of each, in the order they lie."""

    kinds: Kinds

    @classmethod
    def of(cls, *columns: Tensor) -> "Columns":
        """The columns of tensors `[n, width]`."""
        return cls(tuple((column.shape[1], column.dtype) for column in columns))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each column in a row, padding left out."""
        return [width * dtype.itemsize for width, dtype in self.kinds]

    def pack(self, *columns: Tensor) -> Tensor:
        """Rows that hold the columns, uint8 `[n, bytes]`; one column alone stays as it is."""
        if len(columns) == 1:
            return columns[0].contiguous()
        parts = []
        for column, place in zip(columns, _places(self.kinds), strict=True):
            parts.append(_bytes(column))
            if place.padding:
                parts.append(column.new_zeros(len(column), place.padding, dtype=torch.uint8))
        return torch.cat(parts, dim=1)

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """The columns of rows, `[n, width]` each, where they lie."""
        if len(self.kinds) == 1:
            return [rows]
        met = zip(_places(self.kinds), self.kinds, strict=True)
        return [rows[:, place.begin : place.end].view(dtype) for place, (_, dtype) in met]


class _Place(NamedTuple):
    """Begin and end of a column's bytes in a row, and the padding that follows."""

    begin: int
    end: int
    padding: int


@functools.cache
def _places(kinds: Kinds) -> tuple[_Place, ...]:
    """Places of all columns, padded so that the next begins, and a row ends, where its elements can be read."""
    units = [dtype.itemsize for _, dtype in kinds]
    begin, places = 0, []
    for (width, dtype), unit in zip(kinds, [*units[1:], max(units)], strict=True):
        end = begin + width * dtype.itemsize
        places.append(_Place(begin, end, -end % unit))
        begin = end + places[-1].padding
    return tuple(places)


def _bytes(column: Tensor) -> Tensor:
    """A column as uint8 `[n, bytes]`."""
    column = column.contiguous()
    if column.stride(-1) != 1:  # what has one element in a row, or no rows, is contiguous whatever its strides
        column = column.clone(memory_format=torch.contiguous_format)
    return column.view(torch.uint8)
