"""Hidden vectors encoded as fp8 rows and decoded again, every rank at the same time.

Legend: n rows; M hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..encoded import LARGEST, SCALE_BYTES, decoded, encoded
from ..measurement import Size
from ..world import World
from .case import Alone, Grid, Grids
from .precision import float_dtypes, normal

if TYPE_CHECKING:
    from torch import Tensor

CPU_BYTES = 8 * 2**20  # of encoded rows: 4,096 of a hidden size of 1,024, not of 4,096
CUDA_BYTES = 2**30  # every size: 65,536 rows of a hidden size of 8,192 are half as many
GRIDS = Grids(
    quick_cpu=Grid({"rows": (16, 4096), "hidden": (64, 1024)}, most=CPU_BYTES),
    cpu=Grid({"rows": (16, 256, 4096), "hidden": (64, 1024, 4096)}, most=CPU_BYTES),
    quick_cuda=Grid({"rows": (64, 65536), "hidden": (1024, 4096)}, most=CUDA_BYTES),
    cuda=Grid({"rows": (64, 1024, 65536), "hidden": (1024, 4096, 8192)}, most=CUDA_BYTES),
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Encoded rows, uint8 `[n, 4 + M]`, and what arrives of them, `[n, M]`."""

    rows: "Tensor"
    x: "Tensor"


class Fp8Rows(Alone):
    """What a wire in fp8 adds to an exchange of n rows (`runtime.engine.wire`); the work is the bytes of these."""

    name = "fp8_rows"
    unit = "bytes"
    grids = GRIDS

    def dtypes(self, device: str) -> Sequence[str]:
        """The dtypes of models."""
        return float_dtypes(device)

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes of the encoded rows."""
        return size["rows"] * (size["hidden"] + SCALE_BYTES)

    def prepare(self, size: Size, dtype: str, world: World) -> "Tensor":
        """Normal rows of a dtype, `[n, M]`, seeded by the rank."""
        return normal(world, dtype)(size["rows"], size["hidden"])

    def run(self, inputs: "Tensor") -> Decoded:
        """Rows `[n, M]` encoded to `[n, 4 + M]`, and decoded to `[n, M]` as their receiver does."""
        rows_nB = encoded(inputs)
        return Decoded(rows_nB, decoded(rows_nB, inputs.dtype))

    def check(self, inputs: "Tensor", output: Decoded, world: World) -> str | None:
        """Every element is as near as fp8 rows promise ((1) of `encoded`), rounded once more to its dtype."""
        import torch

        exact_nM, scale_n1 = inputs.double(), inputs.abs().amax(1, keepdim=True).double() / LARGEST
        allowed_nM = torch.maximum(exact_nM.abs() / 16, scale_n1 / 1024) * (1 + 1e-6)
        allowed_nM = allowed_nM + exact_nM.abs() * torch.finfo(inputs.dtype).eps
        wrong = int((~((output.x.double() - exact_nM).abs() <= allowed_nM)).any(1).sum())
        return f"{wrong} of {len(inputs)} rows differ" if wrong else None
