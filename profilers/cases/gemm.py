"""Matrix products on the device, every rank at the same time.

Legend: m tokens; k inputs and n outputs of a linear layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..measurement import Size
from ..world import World

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gemm"]

CPU_GRID = ((16, 64, 256, 1024), ((256, 256), (256, 1024), (512, 512), (1024, 256), (1024, 1024)))
CUDA_GRID = ((16, 64, 256, 1024, 4096), ((1024, 1024), (2048, 2048), (2048, 7168), (7168, 2048), (4096, 14336)))
QUICK_GRID = ((16, 256, 1024), ((256, 256), (512, 512), (1024, 256)))
CHECKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Operands:
    """A `[m, k]`, B `[k, n]` and the place of their product `[m, n]`."""

    a_mk: "Tensor"
    b_kn: "Tensor"
    c_mn: "Tensor"


@dataclass(frozen=True, slots=True)
class Gemm:
    """C = A B in fp32 on CPU and bf16 on CUDA; the work is its m n k multiply-adds (2 m n k FLOP)."""

    name: str = "gemm"
    unit: Literal["macs"] = "macs"
    min_ranks: int = 1

    def dtypes(self, device: str) -> Sequence[str]:
        """fp32 on CPU, bf16 on CUDA."""
        return ("fp32",) if device == "cpu" else ("bf16",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """The grid, by work."""
        rows, layers = CUDA_GRID if world.device != "cpu" else QUICK_GRID if quick else CPU_GRID
        grid = [{"m": m, "n": n, "k": k} for m in rows for n, k in layers]
        return sorted(grid, key=lambda size: (self.work(size, 1), size["m"]))

    def work(self, size: Size, num_ranks: int) -> int:  # noqa: ARG002  each rank multiplies alone
        """Multiply-adds of one product."""
        return size["m"] * size["n"] * size["k"]

    def prepare(self, size: Size, dtype: str, world: World) -> Operands:
        """Normal operands, seeded by the rank."""
        import torch

        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        generator = torch.Generator(world.device).manual_seed(world.rank)
        m, n, k = size["m"], size["n"], size["k"]
        return Operands(
            torch.randn(m, k, generator=generator, dtype=kind, device=world.device),
            torch.randn(k, n, generator=generator, dtype=kind, device=world.device),
            torch.full((m, n), torch.nan, dtype=kind, device=world.device),
        )

    def run(self, inputs: Operands) -> "Tensor":
        """The product."""
        import torch

        return torch.mm(inputs.a_mk, inputs.b_kn, out=inputs.c_mn)

    def check(self, inputs: Operands, output: "Tensor", world: World) -> str | None:  # noqa: ARG002  no other rank is asked
        """Compare the last rows with float64, within the rounding of the result and of a float32 sum of k terms."""
        import torch

        expected = inputs.a_mk[-CHECKED_ROWS:].double() @ inputs.b_kn.double()
        error = (output[-CHECKED_ROWS:].double() - expected).abs().max().item()
        rounding = 8 * torch.finfo(output.dtype).eps + len(inputs.b_kn) * torch.finfo(torch.float32).eps
        allowed = rounding * expected.abs().max().item()
        return None if error <= allowed else f"off by {error:.3g}, expected at most {allowed:.3g}"
