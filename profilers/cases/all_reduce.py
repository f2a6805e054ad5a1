"""The all-reduce: every rank gets the reduction of all ranks' buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..measurement import Size
from ..world import World
from .grid import buffer_sizes
from .pattern import share, unlike_whole
from .precision import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["AllReduce"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Buffer of `bytes` bytes, reduced in place."""

    values: "Tensor"
    group: "ProcessGroup | None"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """`all_reduce` in place; the work is the least bytes that leave a rank.

    It takes the maximum, which a second call on its own result leaves as it is; a sum would grow beyond every dtype
    within the repeats. Both move and combine the same bytes.

    Notes
    -----
    With P ranks, a buffer of n bytes and t seconds: each of the n bytes is combined P-1 times and its result sent to
    P-1 ranks, which makes 2 (P-1) n bytes for P ports, hence

        algbw = n / t,        busbw = algbw 2 (P-1) / P = work / t
    """

    name: str = "all_reduce"
    unit: Literal["bytes"] = "bytes"
    min_ranks: int = 2

    def dtypes(self, device: str) -> Sequence[str]:
        """fp32, bf16 and fp16; no fp32 on CUDA, whose maximum NVSwitch does not combine as it does the sum."""
        return ("fp32", "bf16", "fp16") if device == "cpu" else ("bf16", "fp16")

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes of the buffer."""
        return [{"bytes": count} for count in buffer_sizes(world, quick=quick)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes that leave a rank: its part of the reduction and its part of the result."""
        return 2 * (size["bytes"] // num_ranks) * (num_ranks - 1)

    def prepare(self, size: Size, dtype: str, world: World) -> Buffer:
        """The rank's share of the whole."""
        kind = torch_dtype(dtype)
        return Buffer(share(world.rank, world.size, size["bytes"] // kind.itemsize, kind, world.device), world.group)

    def run(self, inputs: Buffer) -> "Tensor":
        """The reduction."""
        import torch.distributed as dist

        dist.all_reduce(inputs.values, dist.ReduceOp.MAX, group=inputs.group)
        return inputs.values

    def check(self, inputs: Buffer, output: "Tensor", world: World) -> str | None:
        """The shares make the whole."""
        return unlike_whole(output)
