"""Causal self-attention with its projections, every rank at the same time.

Legend: B sequences, b of a call; S tokens of each; M hidden size; A heads; C elements of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .case import Alone, Grid, Grids
from .precision import deviation, float_dtypes, normal

if TYPE_CHECKING:
    from torch import Tensor


def _grid(lengths: Sequence[int], batches: Sequence[int], hidden: Sequence[int], *, most: int) -> Grid:
    """The largest batch is attended at once, and one sequence at a time."""
    return Grid({"length": lengths, "batch": batches, "hidden": hidden, "calls": (1, batches[-1])}, most)


GRIDS = Grids(
    quick_cpu=_grid((16, 64, 256), (1, 16), (64, 1024), most=2**31),
    cpu=_grid((16, 64, 256, 1024), (1, 4, 16), (64, 256, 1024), most=2**33),
    quick_cuda=_grid((64, 512, 4096), (1, 8), (1024, 4096), most=2**41),
    cuda=_grid((64, 256, 1024, 4096), (1, 4, 16), (1024, 2048, 4096), most=2**41),
)
HEAD_SIZE = 64


@dataclass(slots=True)
class Weights:
    """An attention's weights: to queries, keys and values `[M, 3 M]`, and of the output `[M, M]`."""

    w_qkv: "Tensor"
    w_out: "Tensor"
    window: int | None = None

    def project(self, x_TM: "Tensor", position_T: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        """Queries, keys and values `[T, A, C]`, the first two rotated."""
        from ..attended import rotated

        q, k, v = (x_TM @ self.w_qkv).view(len(x_TM), 3, -1, HEAD_SIZE).unbind(1)
        return rotated(q, position_T), rotated(k, position_T), v

    def attend(self, q: "Tensor", k: "Tensor", v: "Tensor", mask: "Tensor") -> "Tensor":
        """`[b, Tq, M]` of queries `[b, Tq, A, C]`, keys and values `[b, Tk, A, C]`; a mask `[Tq, Tk]`."""
        from torch.nn import functional

        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y_bAQC = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y_bAQC.transpose(1, 2).flatten(2) @ self.w_out


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens `[T, M]` of sequences one after another, at their positions `[T]`."""

    x: "Tensor"
    position: "Tensor"
    lengths: Sequence[int]
    weights: Weights


class Attention(Alone):
    """Attention as the runtime runs it where samples move (`attended`): causal, heads of 64 elements.

    All tokens are projected to queries, keys and values at once. The samples of each length then attend, and are
    projected to the output, in a call of their own: for more than one call, sequences differ in their lengths.

    The work is the multiply-adds that the answer needs: 4 M^2 a token of the projections, and for each of the
    S (S+1) / 2 pairs of a sequence M for the score and M for the value, S (S+1) M.
    """

    name = "attention"
    unit = "macs"
    grids = GRIDS

    def dtypes(self, device: str) -> Sequence[str]:
        """Dtypes of models; no fp8, which `scaled_dot_product_attention` does not take."""
        return float_dtypes(device)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """The grid of this device; no more calls than sequences."""
        return [size for size in super().sizes(world, quick=quick) if size["calls"] <= size["batch"]]

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of projections, scores and values."""
        lengths, hidden = lengths_of(size), size["hidden"]
        return 4 * sum(lengths) * hidden * hidden + sum(length * (length + 1) for length in lengths) * hidden

    def prepare(self, size: Size, dtype: str, world: World) -> Sequences:
        """Normal tokens and weights that keep their scale, seeded by the rank."""
        import torch

        drawn, hidden, lengths = normal(world, dtype), size["hidden"], lengths_of(size)
        return Sequences(
            drawn(sum(lengths), hidden),
            torch.cat([torch.arange(length, device=world.device) for length in lengths]),
            lengths,
            Weights(
                drawn(hidden, 3 * hidden).mul_(hidden**-0.5),
                drawn(hidden, hidden).mul_(hidden**-0.5),
            ),
        )

    def run(self, inputs: Sequences) -> "Tensor":
        """The attended tokens, `[T, M]`."""
        from ..attended import attended

        return attended(inputs.weights, inputs.x, inputs.position, inputs.lengths)

    def check(self, inputs: Sequences, output: "Tensor", world: World) -> str | None:
        """Compare the first, middle and last rows of the last sequence with softmax(q k^T) v in float64.

        Queries, keys and values, their rotation, shares, their sum and the output are rounded.
        """
        length, weights = inputs.lengths[-1], Weights(inputs.weights.w_qkv.double(), inputs.weights.w_out.double())
        q, k, v = weights.project(inputs.x[-length:].double(), inputs.position[-length:])
        for row in sorted({0, length // 2, length - 1}):
            scores = (q[row] * k[: row + 1]).sum(-1) * HEAD_SIZE**-0.5  # [tokens, A]
            exact = (scores.softmax(0)[..., None] * v[: row + 1]).sum(0).flatten() @ weights.w_out
            if wrong := deviation(output[row - length], exact, roundings=8, terms=max(inputs.x.shape[1], length)):
                return f"token {row} {wrong}"
        return None


def lengths_of(size: Size) -> tuple[int, ...]:
    """Lengths of the sequences of a size: as many as there are calls, around `length`, which is their mean."""
    calls, length = size["calls"], size["length"]
    first = [at - calls // 2 for at in range(calls)]
    around = [length + at + (calls % 2 == 0 and at >= 0) for at in first]
    return tuple(around[at % calls] for at in range(size["batch"]))
