"""Attention of whole samples as `runtime` runs it where these move, every rank at the same time.

Legend: B samples; S tokens of each on average; G calls; T tokens of all; M hidden size; A heads; C elements of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .attention import HEAD_SIZE
from .case import Alone, Grid, Grids
from .precision import deviation, float_dtypes, normal

if TYPE_CHECKING:
    from torch import Tensor


def _grid(lengths: Sequence[int], hidden: Sequence[int], *, most: int) -> Grid:
    """One sample, and 16 of one length or of 16 lengths."""
    return Grid({"length": lengths, "batch": (1, 16), "hidden": hidden, "calls": (1, 16)}, most)


GRIDS = Grids(
    quick_cpu=_grid((16, 256), (64, 1024), most=2**32),
    cpu=_grid((16, 128, 512), (64, 256, 1024), most=2**33),
    quick_cuda=_grid((64, 2048), (1024, 4096), most=2**41),
    cuda=_grid((64, 512, 4096), (1024, 2048, 4096), most=2**41),
)


@dataclass(slots=True)
class Weights:
    """An attention's weights (`attended.Attention`): to queries, keys and values `[M, 3 M]`, of the output `[M, M]`."""

    w_qkv: "Tensor"
    w_out: "Tensor"
    window: int | None = None

    def project(self, x_TM: "Tensor", position_T: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        """Queries, keys and values `[T, A, C]`, the first two rotated."""
        from ..attended import rotated

        q, k, v = (x_TM @ self.w_qkv).view(len(x_TM), 3, -1, HEAD_SIZE).unbind(1)
        return rotated(q, position_T), rotated(k, position_T), v

    def attend(self, q: "Tensor", k: "Tensor", v: "Tensor", mask: "Tensor") -> "Tensor":
        """`[B, Tq, M]` of queries `[B, Tq, A, C]`, keys and values `[B, Tk, A, C]`; a mask `[Tq, Tk]`."""
        from torch.nn import functional

        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y_BAQC = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y_BAQC.transpose(1, 2).flatten(2) @ self.w_out


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens `[T, M]` of samples one after another, at their positions `[T]`."""

    x: "Tensor"
    position: "Tensor"
    lengths: Sequence[int]
    weights: Weights


class Attended(Alone):
    """Four projections, rotation and masked attention (`profilers.attended`), causal, heads of 64 elements.

    Samples have G lengths, two tokens apart and S on average, as many of each, so that they attend in G calls.

    Notes
    -----
    The work is the multiply-adds that the answer needs: 4 M^2 for a token, and M for the score and M for the value of
    each of the n (n+1) / 2 pairs of a sample of n tokens,

        4 B S M^2 + (B S (S+1) + B (G^2 - 1) / 3) M,

    where (G^2 - 1) / 3 is the variance of the lengths.
    """

    name = "attended"
    unit = "macs"
    grids = GRIDS

    def dtypes(self, device: str) -> Sequence[str]:
        """Dtypes of models; no fp8, which `scaled_dot_product_attention` does not take."""
        return float_dtypes(device)

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """The grid of this device; as many samples in each call."""
        return [size for size in super().sizes(world, quick=quick) if size["batch"] % size["calls"] == 0]

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of projections, scores and values."""
        batch, length, hidden, calls = (size[axis] for axis in ("batch", "length", "hidden", "calls"))
        pairs = batch * length * (length + 1) + batch * (calls * calls - 1) // 3
        return 4 * batch * length * hidden * hidden + pairs * hidden

    def prepare(self, size: Size, dtype: str, world: World) -> Samples:
        """Normal tokens and weights that keep their scale, seeded by the rank."""
        import torch

        drawn, hidden, calls = normal(world, dtype), size["hidden"], size["calls"]
        lengths = tuple(size["length"] + 1 - calls + 2 * (at % calls) for at in range(size["batch"]))
        position_T = torch.cat([torch.arange(length, device=world.device) for length in lengths])
        w_qkv, w_out = (drawn(hidden, outputs).mul_(hidden**-0.5) for outputs in (3 * hidden, hidden))
        return Samples(drawn(len(position_T), hidden), position_T, lengths, Weights(w_qkv, w_out))

    def run(self, inputs: Samples) -> "Tensor":
        """The attended tokens, `[T, M]`."""
        from ..attended import attended

        return attended(inputs.weights, inputs.x, inputs.position, inputs.lengths)

    def check(self, inputs: Samples, output: "Tensor", world: World) -> str | None:
        """Compare the first, middle and last rows of the last sample with softmax(q k^T) v in float64.

        Queries, keys and values, their rotation, shares, their sum and the output are rounded.
        """
        length, weights = inputs.lengths[-1], Weights(inputs.weights.w_qkv.double(), inputs.weights.w_out.double())
        q, k, v = weights.project(inputs.x[-length:].double(), inputs.position[-length:])
        for row in sorted({0, length // 2, length - 1}):
            scores_SA = (q[row] * k[: row + 1]).sum(-1) * HEAD_SIZE**-0.5
            exact = (scores_SA.softmax(0)[..., None] * v[: row + 1]).sum(0).flatten() @ weights.w_out
            if wrong := deviation(output[row - length], exact, roundings=8, terms=max(inputs.x.shape[1], length)):
                return f"token {row} {wrong}"
        return None
