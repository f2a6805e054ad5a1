"""Reductions: collectives that combine the ranks' buffers element by element.

Legend: P ranks; n bytes of a buffer; t seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .case import Collective
from .pattern import share, unlike_whole
from .precision import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Reduced:
    """A rank's buffer of n bytes, and the place of the result: the buffer itself, or one of its blocks."""

    values: "Tensor"
    result: "Tensor"
    group: "ProcessGroup | None"


class AllReduce(Collective):
    """`all_reduce` in place; the work is the least bytes that leave a rank.

    It takes the maximum, which a second call on its own result leaves as it is; a sum would grow beyond every dtype
    within the repeats. Both move and combine the same bytes.

    Notes
    -----
    Each of the n bytes is combined P-1 times and its result sent to P-1 ranks, which makes 2 (P-1) n bytes for P
    ports, hence

        algbw = n / t,        busbw = algbw 2 (P-1) / P = work / t
    """

    name = "all_reduce"

    def dtypes(self, device: str) -> Sequence[str]:
        """fp32, bf16 and fp16; no fp32 on CUDA, whose maximum NVSwitch does not combine as it does the sum."""
        return ("fp32", "bf16", "fp16") if device == "cpu" else ("bf16", "fp16")

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes that leave a rank: its part of the reduction and its part of the result."""
        return 2 * (size["bytes"] // num_ranks) * (num_ranks - 1)

    def prepare(self, size: Size, dtype: str, world: World) -> Reduced:
        """The rank's share of the whole."""
        values = _share(size, dtype, world)
        return Reduced(values, values, world.group)

    def run(self, inputs: Reduced) -> "Tensor":
        """The reduction."""
        import torch.distributed as dist

        dist.all_reduce(inputs.values, dist.ReduceOp.MAX, group=inputs.group)
        return inputs.result

    def check(self, inputs: Reduced, output: "Tensor", world: World) -> str | None:
        """The shares make the whole."""
        return unlike_whole(output)


class ReduceScatter(Collective):
    """`reduce_scatter` of one buffer, the sum; the work is the least bytes that leave a rank: the blocks of others.

    Notes
    -----
    Each of the n bytes is combined P-1 times, which makes (P-1) n bytes for P ports, hence

        algbw = n / t,        busbw = algbw (P-1) / P = work / t
    """

    name = "reduce_scatter"

    def dtypes(self, device: str) -> Sequence[str]:
        """fp32, bf16 and fp16."""
        return ("fp32", "bf16", "fp16") if device == "cpu" else ("bf16", "fp16", "fp32")

    def prepare(self, size: Size, dtype: str, world: World) -> Reduced:
        """The rank's share of the whole; the place of the sum holds NaN."""
        import torch

        values = _share(size, dtype, world)
        return Reduced(values, values.new_full((len(values) // world.size,), torch.nan), world.group)

    def run(self, inputs: Reduced) -> "Tensor":
        """The reduction."""
        import torch.distributed as dist

        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
        scatter(inputs.result, inputs.values, group=inputs.group)
        return inputs.result

    def check(self, inputs: Reduced, output: "Tensor", world: World) -> str | None:
        """The shares make the rank's block of the whole."""
        return unlike_whole(output, world.rank * len(output))


def _share(size: Size, dtype: str, world: World) -> "Tensor":
    """A rank's share of a buffer of so many bytes."""
    kind = torch_dtype(dtype)
    return share(world.rank, world.size, size["bytes"] // kind.itemsize, kind, world.device)
