"""The all-gather: every rank gets the blocks of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..measurement import Size
from ..world import World
from .grid import buffer_sizes
from .pattern import NOWHERE, of_sender, unlike

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["AllGather"]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A rank's block and the place of all blocks, uint8 `[bytes]`, by rank of the group."""

    block: "Tensor"
    gathered: "Tensor"
    group: "ProcessGroup | None"


@dataclass(frozen=True, slots=True)
class AllGather:
    """`all_gather` into one buffer; the work is the bytes that reach a rank from others.

    Notes
    -----
    With P ranks, a result of n bytes and t seconds: P-1 of the P blocks come in through a rank's port, hence

        algbw = n / t,        busbw = algbw (P-1) / P = work / t
    """

    name: str = "all_gather"
    unit: Literal["bytes"] = "bytes"
    min_ranks: int = 2

    def dtypes(self, device: str) -> Sequence[str]:
        """Bytes of any element."""
        return ("uint8",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes of the gathered result."""
        return [{"bytes": count} for count in buffer_sizes(world, quick=quick)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes that reach a rank."""
        return size["bytes"] // num_ranks * (num_ranks - 1)

    def prepare(self, size: Size, dtype: str, world: World) -> Gathered:
        """A block that tells its sender and position; the receiving buffer holds a value no block has."""
        block = of_sender(world.rank, 0, size["bytes"] // world.size, world.device)
        return Gathered(block, block.new_full((len(block) * world.size,), NOWHERE), world.group)

    def run(self, inputs: Gathered) -> "Tensor":
        """The gathering."""
        import torch.distributed as dist

        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
        gather(inputs.gathered, inputs.block, group=inputs.group)
        return inputs.gathered

    def check(self, inputs: Gathered, output: "Tensor", world: World) -> str | None:
        """Every block is its sender's."""
        found = (unlike(block, peer, 0) for peer, block in enumerate(output.view(world.size, -1)))
        return next(filter(None, found), None)
