"""Hidden vectors as fp8 rows: one e4m3 number for each element and one scale for the row, encoded and decoded.

Legend: n rows; M hidden size.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE_BYTES = 4
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-126  # below it scales lose digits


def encoded(x_nM: "Tensor") -> "Tensor":
    """Rows of bytes, uint8 `[n, 4 + M]`: the scale as float32, then the elements over it as e4m3.

    Notes
    -----
    With s = max |x| / 448 and rounding to nearest, an element errs by at most

        |x - x'| <= max(|x| / 16, s / 1024)                                                                     (1)

    A row of zeros stays one. A row with an infinity or a NaN arrives as NaN all over, so that whoever looks for either
    still finds it.
    """
    import torch

    least_n1, most_n1 = x_nM.aminmax(dim=1, keepdim=True)
    scale_n1 = (torch.maximum(-least_n1, most_n1).float() / LARGEST).clamp(min=LEAST_SCALE)
    code_nM = (x_nM / scale_n1).to(torch.float8_e4m3fn)
    return torch.cat([scale_n1.view(torch.uint8), code_nM.view(torch.uint8)], dim=1)


def decoded(rows_nB: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Hidden vectors `[n, M]` of a dtype, float, from rows of bytes, uint8 `[n, 4 + M]`."""
    import torch

    scale_n1 = rows_nB[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    x_nM = rows_nB[:, SCALE_BYTES:].view(torch.float8_e4m3fn).to(dtype)
    return torch.mul(x_nM, scale_n1, out=x_nM)
