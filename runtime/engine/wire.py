"""Hidden vectors under way as fp8 rows.

Legend: n rows; M hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ...profilers.encoded import decoded


@dataclass(frozen=True, slots=True)
class Sealed:
    """Hidden vectors under way in encoded rows, and those that stay on this device, exact, by piece."""

    dtype: torch.dtype
    exact: Sequence[Tensor]
    places: Sequence[slice]  #: Where these are in each piece that arrives

    @classmethod
    def of(cls, x_nM: Tensor, sent: Sequence[slice], places: Sequence[slice]) -> Self:
        """Rows that are about to be sent, sealed; those at `sent` stay here."""
        return cls(x_nM.dtype, [x_nM[rows].clone() for rows in sent], places)

    def opened(self, piece: int, rows_nB: Tensor) -> Tensor:
        """The hidden vectors of a piece that arrived."""
        x_nM = decoded(rows_nB, self.dtype)
        x_nM[self.places[piece]] = self.exact[piece]
        return x_nM
