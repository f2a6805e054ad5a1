"""The all-to-all of expert parallelism: every rank sends an equal block to every rank."""

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

__all__ = ["AllToAll"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Buffers that a rank sends and receives, uint8 `[bytes]`: block p to and from rank p of the group."""

    send: "Tensor"
    received: "Tensor"
    group: "ProcessGroup | None"


@dataclass(frozen=True, slots=True)
class AllToAll:
    """`all_to_all_single` with equal blocks; the work is the bytes that leave a rank for others.

    Notes
    -----
    As in nccl-tests, with P ranks, a buffer of n bytes a rank and t seconds: a rank keeps one of its P blocks and sends
    P-1 through its port, hence

        algbw = n / t,        busbw = algbw (P-1) / P = work / t

    busbw compares with the hardware's figure for one direction of a port, whatever P is.
    """

    name: str = "all_to_all"
    unit: Literal["bytes"] = "bytes"
    min_ranks: int = 2

    def dtypes(self, device: str) -> Sequence[str]:
        """Bytes of any element."""
        return ("uint8",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes of a rank's buffer."""
        return [{"bytes": count} for count in buffer_sizes(world, quick=quick)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes that leave a rank."""
        return size["bytes"] // num_ranks * (num_ranks - 1)

    def prepare(self, size: Size, dtype: str, world: World) -> Blocks:
        """Blocks that tell sender, receiver and position; the receiving buffer holds a value none of them has."""
        import torch

        block = size["bytes"] // world.size
        send = torch.cat([of_sender(world.rank, peer, block, world.device) for peer in range(world.size)])
        return Blocks(send, torch.full_like(send, NOWHERE), world.group)

    def run(self, inputs: Blocks) -> "Tensor":
        """The exchange."""
        import torch.distributed as dist

        dist.all_to_all_single(inputs.received, inputs.send, group=inputs.group)
        return inputs.received

    def check(self, inputs: Blocks, output: "Tensor", world: World) -> str | None:
        """Every block is the one its sender made for this rank."""
        found = (unlike(block, peer, world.rank) for peer, block in enumerate(output.view(world.size, -1)))
        return next(filter(None, found), None)
