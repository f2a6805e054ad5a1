"""Two ranks that send each other a buffer while the others wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .case import Collective
from .pattern import NOWHERE, of_sender, unlike

if TYPE_CHECKING:
    from torch import Tensor

QUICK_BYTES = (2**6, 2**20)
CPU_BYTES = (2**6, 2**10, 2**14, 2**18, 2**22, 2**24)
CUDA_BYTES = (2**6, 2**12, 2**18, 2**22, 2**26, 2**28)
ALL_PAIRS = 120  # of 16 ranks
PAIRS_A_DISTANCE = 16


@dataclass(frozen=True, slots=True)
class Ends:
    """Buffers that one of the two ranks sends and receives, uint8 `[bytes]`, and the rank of its peer."""

    send: "Tensor"
    received: "Tensor"
    peer: int


class PointToPoint(Collective):
    """A send and a receive at the same time between two ranks; the work is the bytes of one direction.

    Notes
    -----
    With n bytes each way in t seconds, t of the smallest n is the latency of a direction, and

        algbw = busbw = n / t = work / t

    the bandwidth of a direction while the other is as busy, as in an all-to-all.
    """

    name = "point_to_point"

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """A small and a large buffer when quick, else more, for each of `pairs`."""
        counts = QUICK_BYTES if quick else CPU_BYTES if world.device == "cpu" else CUDA_BYTES
        return [{"bytes": count, "first": one, "second": two} for count in counts for one, two in pairs(world.size)]

    def work(self, size: Size, num_ranks: int) -> int:
        """Bytes of one direction."""
        return size["bytes"]

    def prepare(self, size: Size, dtype: str, world: World) -> Ends | None:
        """Bytes that tell sender, receiver and position; None on ranks that wait."""
        ends = {size["first"]: size["second"], size["second"]: size["first"]}
        if world.rank not in ends:
            return None
        send = of_sender(world.rank, ends[world.rank], size["bytes"], world.device)
        return Ends(send, send.new_full(send.shape, NOWHERE), ends[world.rank])

    def run(self, inputs: Ends | None) -> "Tensor | None":
        """The exchange, of which ranks that wait have no part."""
        import torch.distributed as dist

        if inputs is None:
            return None
        # To receive first: gloo's word that a buffer is ready would wait behind what is sent, and both ways take turns.
        calls = [dist.P2POp(dist.irecv, inputs.received, inputs.peer), dist.P2POp(dist.isend, inputs.send, inputs.peer)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return inputs.received

    def check(self, inputs: Ends | None, output: "Tensor | None", world: World) -> str | None:
        """The bytes are those the peer made for this rank."""
        if inputs is None:
            return None
        assert output is not None
        return unlike(output, inputs.peer, world.rank)


def pairs(num_ranks: int) -> list[tuple[int, int]]:
    """All pairs of up to 16 ranks; of more, at each power of two of a distance 16 pairs spread evenly over the ranks.

    Where consecutive ranks share a node, the short distances stay inside it and the long ones leave it.
    """
    if num_ranks * (num_ranks - 1) // 2 <= ALL_PAIRS:
        return list(combinations(range(num_ranks), 2))
    distances = [1 << power for power in range((num_ranks - 1).bit_length())]
    return [(first, first + distance) for distance in distances for first in _spread(num_ranks - distance)]


def _spread(count: int) -> list[int]:
    """At most 16 of `count` ranks, evenly."""
    return list(range(0, count, -(-count // PAIRS_A_DISTANCE)))
