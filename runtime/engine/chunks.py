"""The chunks of a layer's tokens: those of the forward and of the backward pass, and the pieces that make up both.

Legend: P pieces; T tokens.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decisions import PipelineDecision, boundaries


@dataclass(frozen=True, slots=True)
class Chunks:
    """Tokens in P pieces, cut at every boundary of either pass."""

    #: Where pieces begin and, last, end, as shares of the tokens, ascending from 0 to 1, `[P + 1]`
    cuts: tuple[float, ...]
    #: forward, backward: the pieces of each chunk of a pass
    forward: tuple[range, ...]
    backward: tuple[range, ...]
    #: Rows of every slot's buffer over their mean, what is beyond being dropped; None: no buffers, nothing dropped
    capacity_factor: float | None = None

    @classmethod
    def of(cls, forward: Sequence[float], backward: Sequence[float], capacity_factor: float | None = None) -> "Chunks":
        """The chunks of these shares, each summing to 1."""
        ends = [boundaries(shares) for shares in (forward, backward)]
        cuts = sorted({*ends[0], *ends[1]})
        first, second = (tuple(_between(cuts, chosen)) for chosen in ends)
        return cls(tuple(cuts), first, second, capacity_factor)

    @classmethod
    def whole(cls) -> "Chunks":
        """A single chunk for each pass: nothing overlaps."""
        return cls.of([1.0], [1.0])

    @classmethod
    def planned(cls, pipeline: PipelineDecision | None, layer: int) -> "Chunks":
        """Chunks that a plan decides for an MoE layer; the backward pass is cut as the forward one unless it says."""
        if pipeline is None:
            return cls.whole()
        degrees = pipeline.forward[layer], (pipeline.backward or pipeline.forward)[layer]
        forward, backward = ([1 / degree] * degree for degree in degrees)
        if (shares := pipeline.shares) is not None:
            forward, backward = ([*of_pass[layer]] for of_pass in (shares.forward, shares.backward or shares.forward))
        return cls.of(forward, backward, pipeline.capacity_factor)

    @property
    def num_pieces(self) -> int:
        """P."""
        return len(self.cuts) - 1

    def padded(self, capacity: int) -> int:
        """The least multiple of both degrees that is not below a capacity."""
        unit = math.lcm(len(self.forward), len(self.backward))
        return -(-capacity // unit) * unit

    def piece_of(self, num_tokens: int, device: torch.device) -> Tensor:
        """The piece of each of T tokens in order, int64 `[T]`."""
        if self.num_pieces == 1:
            return torch.zeros(num_tokens, dtype=torch.int64, device=device)
        ends = [round(cut * num_tokens) for cut in self.cuts]
        sizes = torch.tensor([end - start for start, end in itertools.pairwise(ends)], device=device)
        return torch.arange(self.num_pieces, device=device).repeat_interleave(sizes, output_size=num_tokens)


def _between(cuts: list[float], chosen: list[float]) -> list[range]:
    place = {cut: number for number, cut in enumerate(cuts)}
    return [range(place[first], place[last]) for first, last in itertools.pairwise(chosen)]
