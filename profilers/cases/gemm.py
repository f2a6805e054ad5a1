"""Matrix products on the device, every rank at the same time.

Legend: m tokens; k inputs and n outputs of a linear layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .case import Alone, Grid, Grids
from .precision import deviation, float_dtypes, normal, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

LAYER = (64, 256, 1024, 2048)
CUDA_LAYER = (1024, 2048, 4096, 8192, 16384)
GRIDS = Grids(
    quick_cpu=Grid({"m": (16, 128, 1024), "n": (64, 1024), "k": (64, 1024)}, most=2**30),
    cpu=Grid({"m": (1, 16, 128, 512, 2048), "n": LAYER, "k": LAYER}, most=2**31),
    quick_cuda=Grid({"m": (16, 128, 1024, 8192), "n": (1024, 4096, 16384), "k": (1024, 8192)}, most=2**41),
    cuda=Grid({"m": (16, 64, 128, 512, 2048, 8192), "n": CUDA_LAYER, "k": CUDA_LAYER[:-1]}, most=2**41),
)
CHECKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Operands:
    """A `[m, k]`, B `[k, n]`, the place of their product `[m, n]`, and the scale of both where they are fp8."""

    a_mk: "Tensor"
    b_kn: "Tensor"
    c_mn: "Tensor"
    scale: "Tensor | None"


class Gemm(Alone):
    """C = A B; the work is its m n k multiply-adds (2 m n k FLOP)."""

    name = "gemm"
    unit = "macs"
    grids = GRIDS

    def dtypes(self, device: str) -> Sequence[str]:
        """Dtypes of models; fp8 (e4m3, one scale per matrix, product in bf16) where the GPU multiplies it."""
        import torch

        has_fp8 = device != "cpu" and torch.cuda.get_device_capability(device) >= (8, 9)
        return (*float_dtypes(device), "fp8") if has_fp8 else float_dtypes(device)

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of one product."""
        return size["m"] * size["n"] * size["k"]

    def prepare(self, size: Size, dtype: str, world: World) -> Operands:
        """Normal operands, seeded by the rank."""
        import torch

        m, n, k = size["m"], size["n"], size["k"]
        kind, drawn = torch_dtype(dtype), normal(world, "bf16" if dtype == "fp8" else dtype)
        a_mk, b_nk = drawn(m, k), drawn(n, k)
        return Operands(
            a_mk.to(kind),
            b_nk.to(kind).t() if dtype == "fp8" else b_nk.t().contiguous(),  # fp8 kernels want B by columns
            torch.full((m, n), torch.nan, dtype=a_mk.dtype, device=world.device),
            torch.ones((), device=world.device) if dtype == "fp8" else None,
        )

    def run(self, inputs: Operands) -> "Tensor":
        """The product."""
        import torch

        a_mk, b_kn, c_mn, scale = inputs.a_mk, inputs.b_kn, inputs.c_mn, inputs.scale
        if scale is None:
            return torch.mm(a_mk, b_kn, out=c_mn)
        return torch._scaled_mm(a_mk, b_kn, scale, scale, out_dtype=c_mn.dtype)

    def check(self, inputs: Operands, output: "Tensor", world: World) -> str | None:
        """Compare the last rows with float64; a product split along k is rounded once more when it is put together."""
        exact = inputs.a_mk[-CHECKED_ROWS:].double() @ inputs.b_kn.double()
        return deviation(output[-CHECKED_ROWS:], exact, roundings=2, terms=len(inputs.b_kn))
