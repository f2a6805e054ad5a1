"""Hidden vectors as fp8 rows: one e4m3 number for each element and one scale for the row, encoded and decoded.

Legend: n rows; M hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..wire import SCALE_BYTES

LARGEST = 448.0  # of e4m3
LEAST_SCALE = torch.finfo(torch.float32).tiny  # below it scales lose digits


def encoded(x_nM: Tensor) -> Tensor:
    """Rows of bytes, uint8 `[n, 4 + M]`: the scale as float32, then the elements over it as e4m3.

    Notes
    -----
    With s = max |x| / 448 and rounding to nearest, an element errs by at most

        |x - x'| <= max(|x| / 16, s / 1024)                                                                     (1)

    A row of zeros stays one. A row with an infinity or a NaN arrives as NaN all over, so that whoever looks for either
    still finds it.
    """
    least_n1, most_n1 = x_nM.aminmax(dim=1, keepdim=True)
    scale_n1 = (torch.maximum(-least_n1, most_n1).float() / LARGEST).clamp(min=LEAST_SCALE)
    code_nM = (x_nM / scale_n1).to(torch.float8_e4m3fn)
    return torch.cat([scale_n1.view(torch.uint8), code_nM.view(torch.uint8)], dim=1)


def decoded(rows_nB: Tensor, dtype: torch.dtype) -> Tensor:
    """The hidden vectors `[n, M]` of rows of bytes."""
    scale_n1 = rows_nB[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    x_nM = rows_nB[:, SCALE_BYTES:].view(torch.float8_e4m3fn).to(dtype)
    return torch.mul(x_nM, scale_n1, out=x_nM)


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
