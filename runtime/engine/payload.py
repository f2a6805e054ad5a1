"""Rows of bytes: columns of several kinds side by side, so that one exchange carries them all.

Legend: n rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Columns"]

ALIGNMENT = 8  # bytes that a row is a multiple of, so that a column of any kind can be read where it lies


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a row: the width and the element type of each, in the order they lie."""

    kinds: tuple[tuple[int, torch.dtype], ...]

    @classmethod
    def of(cls, *columns: Tensor) -> "Columns":
        """Those of tensors `[n, width]`."""
        return cls(tuple((column.shape[1], column.dtype) for column in columns))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each column in a row, padding left out."""
        return [width * dtype.itemsize for width, dtype in self.kinds]

    def pack(self, *columns: Tensor) -> Tensor:
        """Rows that hold the columns, uint8 `[n, bytes]`; one column alone stays as it is."""
        if len(columns) == 1:
            return columns[0].contiguous()
        offsets = self._offsets()
        rows = columns[0].new_empty(len(columns[0]), offsets[-1], dtype=torch.uint8)
        for place, column in zip(self._places(rows), columns, strict=True):
            place.copy_(column)
        return rows

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """The columns of rows, `[n, width]` each, where they lie."""
        return [rows] if len(self.kinds) == 1 else self._places(rows)

    def _places(self, rows: Tensor) -> list[Tensor]:
        starts = zip(self._offsets(), self.sizes, self.kinds, strict=False)
        return [rows[:, start : start + size].view(dtype) for start, size, (_, dtype) in starts]

    def _offsets(self) -> list[int]:
        """Where each column begins and, last, where the next row does."""
        offsets = [0]
        for size in self.sizes:
            offsets.append(-(-(offsets[-1] + size) // ALIGNMENT) * ALIGNMENT)
        return offsets
