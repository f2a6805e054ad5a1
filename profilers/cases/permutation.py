"""Sorting tokens by expert and back, every rank at the same time.

Legend: T token-expert pairs, a row each; M hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..series import ELEMENT_BYTES
from ..world import World
from .case import Alone, Grid, Grids

if TYPE_CHECKING:
    from torch import Tensor

GRIDS = Grids(
    quick_cpu=Grid({"tokens": (64, 4096), "hidden": (64, 1024)}, most=2**30),
    cpu=Grid({"tokens": (64, 512, 4096, 16384), "hidden": (64, 256, 1024, 4096)}, most=2**29),
    quick_cuda=Grid({"tokens": (64, 1024, 65536), "hidden": (1024, 4096)}, most=2**34),
    cuda=Grid({"tokens": (64, 1024, 8192, 65536), "hidden": (1024, 2048, 4096)}, most=2**34),
)
DTYPE = "fp32"
STRIDE = 128  # rows differ in every column, and integers below 2**24 are exact in float32


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens `[T, M]`, the order `[T]` to gather them in and the one back, and the places of both results."""

    x: "Tensor"
    order: "Tensor"
    order_back: "Tensor"
    by_expert: "Tensor"
    restored: "Tensor"


class Permutation(Alone):
    """A gather into expert order and a gather back; the work is the bytes read and written, 4 T M elements."""

    name = "permutation"
    unit = "bytes"
    grids = GRIDS

    def dtypes(self, device: str) -> Sequence[str]:
        """fp32 only: rows of M elements in bf16 are rows of M / 2 in fp32."""
        return (DTYPE,)

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes read and written, twice each."""
        return 4 * ELEMENT_BYTES[DTYPE] * size["tokens"] * size["hidden"]

    def prepare(self, size: Size, dtype: str, world: World) -> Rows:
        """Rows that tell token and column, and an order seeded by the rank."""
        import torch

        generator = torch.Generator(world.device).manual_seed(world.rank)
        order_T = torch.randperm(size["tokens"], generator=generator, device=world.device)
        x_TM = _rows(torch.arange(size["tokens"], device=world.device), size["hidden"])
        sorted_TM, restored_TM = torch.full_like(x_TM, torch.nan), torch.full_like(x_TM, torch.nan)
        return Rows(x_TM, order_T, order_T.argsort(), sorted_TM, restored_TM)

    def run(self, inputs: Rows) -> tuple["Tensor", "Tensor"]:
        """Tokens in expert order, and back in their own."""
        import torch

        torch.index_select(inputs.x, 0, inputs.order, out=inputs.by_expert)
        torch.index_select(inputs.by_expert, 0, inputs.order_back, out=inputs.restored)
        return inputs.by_expert, inputs.restored

    def check(self, inputs: Rows, output: tuple["Tensor", "Tensor"], world: World) -> str | None:
        """Every row is the token's that belongs there, in both results."""
        import torch

        ascending_T = torch.arange(len(inputs.x), device=inputs.x.device)
        for name, found_TM, token_T in zip(("sorted", "restored"), output, (inputs.order, ascending_T), strict=True):
            wrong = int((found_TM != _rows(token_T, found_TM.shape[1])).any(-1).sum())
            if wrong:
                return f"{wrong} of {len(found_TM)} {name} rows differ"
        return None


def _rows(token_T: "Tensor", hidden: int) -> "Tensor":
    """Rows of these tokens, float32 `[T, M]`."""
    import torch

    return (STRIDE * token_T).float()[:, None] + torch.arange(hidden, device=token_T.device)
