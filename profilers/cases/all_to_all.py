"""The all-to-all of expert parallelism: every rank sends an equal block to every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..measurement import Size
from ..world import World

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AllToAll"]

CPU_BYTES, CUDA_BYTES = 32 * 2**20, 2 * 2**30  # the largest buffer of a rank
SMALLEST_BYTES = 256
MODULUS = 251  # the largest prime of a byte: neighbouring ranks and positions never look alike


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a rank sends and receives, uint8 `[P * bytes_per_pair]`, block p to and from rank p of P."""

    send: "Tensor"
    received: "Tensor"


@dataclass(frozen=True, slots=True)
class AllToAll:
    """`all_to_all_single` with equal blocks; the work is the bytes that leave a rank for others.

    Notes
    -----
    As in nccl-tests, with P ranks, b bytes a pair and t seconds: a rank's buffer has P b bytes, of which it keeps one
    block and sends P-1 through its port, hence

        algbw = P b / t,        busbw = algbw (P-1) / P = (P-1) b / t = work / t

    busbw compares with the hardware's figure for one direction of a port, whatever P is.
    """

    name: str = "all_to_all"
    unit: Literal["bytes"] = "bytes"
    min_ranks: int = 2

    def dtypes(self, device: str) -> Sequence[str]:  # noqa: ARG002  bytes are bytes
        """Bytes of any element."""
        return ("uint8",)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """Bytes a rank pair: powers of two, of four when quick, while all blocks of a rank fit its buffer."""
        largest = (CPU_BYTES if world.device == "cpu" else CUDA_BYTES) // world.size
        if quick:
            largest //= 4
        octaves = range(0, (largest // SMALLEST_BYTES).bit_length(), 2 if quick else 1)
        return [{"bytes_per_pair": SMALLEST_BYTES << octave} for octave in octaves]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes that leave a rank."""
        return size["bytes_per_pair"] * (num_ranks - 1)

    def prepare(self, size: Size, dtype: str, world: World) -> Blocks:  # noqa: ARG002
        """Blocks that tell sender, receiver and position; the receiving buffer holds a value none of them has."""
        import torch

        sent = [_block(world.rank, peer, size["bytes_per_pair"], world.device) for peer in range(world.size)]
        send = torch.cat(sent)
        return Blocks(send, torch.full_like(send, 255))

    def run(self, inputs: Blocks) -> "Tensor":
        """The exchange."""
        import torch.distributed as dist

        dist.all_to_all_single(inputs.received, inputs.send)
        return inputs.received

    def check(self, inputs: Blocks, output: "Tensor", world: World) -> str | None:  # noqa: ARG002  it is all in the output
        """Every block is the one its sender made for this rank."""
        for peer, block in enumerate(output.view(world.size, -1)):
            wrong = (block != _block(peer, world.rank, block.numel(), world.device)).sum().item()
            if wrong:
                return f"{wrong} of {block.numel()} bytes from rank {peer} differ"
        return None


def _block(sender: int, receiver: int, length: int, device: str) -> "Tensor":
    import torch

    first = (31 * sender + 17 * receiver) % MODULUS
    ramp = torch.arange(MODULUS, device=device, dtype=torch.uint8)
    return ramp.repeat((first + length) // MODULUS + 1)[first : first + length]
