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


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens `[B, S, M]`, the projections to queries, keys and values `[M, 3 M]` and of the output `[M, M]`."""

    x: "Tensor"
    w_qkv: "Tensor"
    w_out: "Tensor"
    calls: int  #: In which the sequences attend


class Attention(Alone):
    """Four projections and `scaled_dot_product_attention`, causal, heads of 64 elements.

    The runtime projects all tokens to queries, keys and values at once; the samples of each length then attend, and are
    projected to the output, in a call of their own. So do the sequences here, in `calls` calls.

    The work is the multiply-adds that the answer needs: 4 B S M^2 of the projections, and for each of the S (S+1) / 2
    pairs of a sequence M for the score and M for the value, B S (S+1) M.
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
        tokens, length, hidden = size["batch"] * size["length"], size["length"], size["hidden"]
        return 4 * tokens * hidden * hidden + tokens * (length + 1) * hidden

    def prepare(self, size: Size, dtype: str, world: World) -> Sequences:
        """Normal tokens and weights that keep their scale, seeded by the rank."""
        drawn, hidden = normal(world, dtype), size["hidden"]
        return Sequences(
            drawn(size["batch"], size["length"], hidden),
            drawn(hidden, 3 * hidden).mul_(hidden**-0.5),
            drawn(hidden, hidden).mul_(hidden**-0.5),
            size["calls"],
        )

    def run(self, inputs: Sequences) -> "Tensor":
        """The attended tokens, `[B, S, M]`."""
        import torch
        from torch.nn import functional

        y = []
        for of_call in _heads(inputs.x @ inputs.w_qkv).tensor_split(inputs.calls):
            q, k, v = of_call.unbind(-4)
            y_bASC = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y.append(y_bASC.transpose(-3, -2).flatten(-2) @ inputs.w_out)
        return y[0] if inputs.calls == 1 else torch.cat(y)

    def check(self, inputs: Sequences, output: "Tensor", world: World) -> str | None:
        """Compare the first, middle and last rows of the last sequence with softmax(q k^T) v in float64.

        Queries, keys and values, shares, their sum and the output are rounded.
        """
        _, length, hidden = inputs.x.shape
        q, k, v = _heads(inputs.x[-1].double() @ inputs.w_qkv.double()).unbind(-4)
        for row in sorted({0, length // 2, length - 1}):
            scores = q[:, row : row + 1] @ k[:, : row + 1].transpose(-2, -1) * HEAD_SIZE**-0.5
            attended = (scores.softmax(-1) @ v[:, : row + 1]).flatten()
            exact = attended @ inputs.w_out.double()
            if wrong := deviation(output[-1, row], exact, roundings=5, terms=max(hidden, length)):
                return f"token {row} {wrong}"
        return None


def _heads(qkv: "Tensor") -> "Tensor":
    """`[..., S, 3 M]` as queries, keys and values of heads, `[..., 3, A, S, C]`."""
    return qkv.view(*qkv.shape[:-1], 3, -1, HEAD_SIZE).movedim(-4, -2)
