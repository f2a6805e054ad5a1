"""The reduce-scatter: every rank gets its block of the sum of all ranks' buffers."""

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

__all__ = ["ReduceScatter"]


@dataclass(frozen=True, slots=True)
class Scattered:
    """A rank's buffer of `bytes` bytes and the place of its block of the sum."""

    values: "Tensor"
    block: "Tensor"
    group: "ProcessGroup | None"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """`reduce_scatter` of one buffer, the sum; the work is the least bytes that leave a rank.

    Notes
    -----
    With P ranks, a buffer of n bytes and t seconds: each of the n bytes is combined P-1 times, which makes (P-1) n
    bytes for P ports, hence

        algbw = n / t,        busbw = algbw (P-1) / P = work / t
    """

    name: str = "reduce_scatter"
    unit: Literal["bytes"] = "bytes"
    min_ranks: int = 2

    def dtypes(self, device: str) -> Sequence[str]:
        """fp32, bf16 and fp16."""
        return ("fp32", "bf16", "fp16") if device == "cpu" else ("bf16", "fp16", "fp32")

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes of a rank's buffer."""
        return [{"bytes": count} for count in buffer_sizes(world, quick=quick)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes that leave a rank: the blocks of others."""
        return size["bytes"] // num_ranks * (num_ranks - 1)

    def prepare(self, size: Size, dtype: str, world: World) -> Scattered:
        """The rank's share of the whole; the place of the sum holds NaN."""
        import torch

        kind = torch_dtype(dtype)
        values = share(world.rank, world.size, size["bytes"] // kind.itemsize, kind, world.device)
        return Scattered(values, values.new_full((len(values) // world.size,), torch.nan), world.group)

    def run(self, inputs: Scattered) -> "Tensor":
        """The reduction."""
        import torch.distributed as dist

        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
        scatter(inputs.block, inputs.values, group=inputs.group)
        return inputs.block

    def check(self, inputs: Scattered, output: "Tensor", world: World) -> str | None:
        """The shares make the rank's block of the whole."""
        return unlike_whole(output, world.rank * len(output))
