"""The case of condensation's own work, every rank at the same time: rows that stand for others, found and folded.

Legend: n copies, two a token; T tokens; G groups of copies that ask one device for the same expert; M hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..profilers.cases.case import Alone, Grid, Grids
from ..profilers.cases.precision import deviation, float_dtypes, normal, torch_dtype
from ..profilers.cases.works import WORKS
from ..profilers.measurement import Size
from ..profilers.world import World
from ..solvers.arrays import Ints

if TYPE_CHECKING:
    from torch import Tensor

    from .engine.copies import Copies

TOP_K = 2
REACH, APART = 0.12, 0.05  # error that a copy may add; distance of near rows from what they share, as a share of it
NEAR = 3  # of four rows of a group, three are near to one another: half of all rows travel


def _axes(rows: Sequence[int], group: Sequence[int], hidden: Sequence[int]) -> dict[str, Sequence[int]]:
    return {"rows": rows, "group": group, "hidden": hidden, "backward": (0, 1)}


GRIDS = Grids(
    quick_cpu=Grid(_axes((256, 4096), (16, 128), (64, 1024)), most=2**29),
    cpu=Grid(_axes((256, 2048, 16384), (16, 128), (64, 1024)), most=2**31),
    quick_cuda=Grid(_axes((2048, 65536), (64, 1024), (1024, 4096)), most=2**38),
    cuda=Grid(_axes((2048, 16384, 65536), (64, 1024), (1024, 8192)), most=2**38),
)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Tokens with experts on two other devices, and the gradients by what comes of them."""

    copies: "Copies"  #: `[n]`, in one piece
    x: "Tensor"  #: `[T, M]`
    weight: "Tensor"  #: Gate weights `[T, K]`
    near: "Tensor"  #: Which tokens are near to one another: the number of what they share, int64 `[T]`
    grad: "Tensor | None"  #: By the sums of tokens, `[T, M]`; None: forward alone


@dataclass(frozen=True, slots=True)
class Folded:
    """Sums of tokens `[T, M]` where experts return what they get, and gradients by x and gate weights if asked for."""

    y: "Tensor"
    grads: "Sequence[Tensor]"


class CondensedRows(Alone):
    """What condensation adds to a layer (`runtime.engine.condenser`) with n copies for other devices; no exchange.

    Rows for one device and expert are compared with one another, with `group` others in the mean over rows. Groups have
    unequal sizes, which fall as an exponential does. The work is the multiply-adds of these comparisons.
    """

    name = "condensed_rows"
    unit = "macs"
    grids = GRIDS
    curve = "rows"  # host time decides where rows are few, comparisons or memory where they are many

    def dtypes(self, device: str) -> Sequence[str]:
        """The dtypes of models."""
        return float_dtypes(device)

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of the comparisons."""
        return int(WORKS[self.name](size))

    def prepare(self, size: Size, dtype: str, world: World) -> Gathered:
        """Tokens in random order, of each group three in four near to one another in threes; seeded by the rank."""
        import torch

        from .engine.copies import select

        tokens, drawn = size["rows"] // TOP_K, normal(world, dtype)
        sizes_G = torch.from_numpy(group_sizes(tokens, size["group"]))
        order_T = torch.randperm(tokens, generator=torch.Generator().manual_seed(world.rank))
        group_T = torch.arange(len(sizes_G)).repeat_interleave(sizes_G)
        within_T = torch.arange(tokens) - (sizes_G.cumsum(0) - sizes_G)[group_T]
        alone_T = within_T % (NEAR + 1) == NEAR
        near_T = torch.unique(group_T * tokens * 2 + within_T // (NEAR + 1) * 2 + alone_T, return_inverse=True)[1]
        group_T, near_T = group_T[order_T], near_T[order_T].to(world.device)
        ids_TK = torch.stack([group_T, group_T + len(sizes_G)], dim=1).to(world.device)
        device_TK = torch.arange(TOP_K, device=world.device).expand(tokens, TOP_K).contiguous()
        gate_T = torch.rand(tokens, generator=torch.Generator().manual_seed(world.rank)) * 0.5 + 0.25
        return Gathered(
            select(ids_TK, device_TK, None, (1, TOP_K + 1)),
            drawn(tokens, size["hidden"])[near_T] + APART * drawn(tokens, size["hidden"]),
            torch.stack([gate_T, 1 - gate_T], dim=1).to(world.device, torch_dtype(dtype)),
            near_T,
            drawn(tokens, size["hidden"]) if size["backward"] else None,
        )

    def run(self, inputs: Gathered) -> Folded:
        """Find the copies that stand for others, fold them, spread what returns; gradients by x and weights."""
        import torch

        from .engine.chunks import Chunks
        from .engine.condenser import standing
        from .engine.fold import Fold

        trains = inputs.grad is not None
        x_TM, weight_TK = (one.detach().requires_grad_(trains) for one in (inputs.x, inputs.weight))
        with torch.set_grad_enabled(trains):
            remote_n = inputs.copies.place < TOP_K
            stands_n = standing(inputs.copies, x_TM, weight_TK, remote_n, REACH, cosine=False)
            fold = Fold.of(inputs.copies, x_TM, weight_TK, stands_n, Chunks.whole(), medoid=False)
            y_TM = fold.spread(fold.x, len(x_TM))
        if inputs.grad is None:
            return Folded(y_TM, ())
        sent = [y_TM, fold.weight]
        return Folded(y_TM.detach(), torch.autograd.grad(sent, [x_TM, weight_TK], [inputs.grad, fold.weight.detach()]))

    def check(self, inputs: Gathered, output: Folded, world: World) -> str | None:
        """Compare sums and gradients with those of the near tokens themselves, in float64 ((1) of `Fold.of`)."""
        import torch

        exact = (torch.zeros_like(one, dtype=torch.float64) for one in (inputs.x, inputs.x, inputs.weight))
        y_TM, x_TM, weight_TK = exact
        several_T1 = (inputs.near.bincount()[inputs.near] > 1)[:, None]
        for choice, gate_T1 in enumerate(inputs.weight.double().T[:, :, None]):
            part_T1 = gate_T1.square() / _shared(gate_T1.square(), inputs.near)
            mean_TM, scale_T1 = _shared(part_T1 * inputs.x, inputs.near), gate_T1.where(several_T1, 1)
            y_TM += scale_T1 * mean_TM
            if inputs.grad is not None:
                x_TM += part_T1 * _shared(scale_T1 * inputs.grad, inputs.near)
                weight_TK[:, choice] += (inputs.grad * mean_TM).sum(1).where(several_T1[:, 0], 0)
                weight_TK += inputs.weight.where(~several_T1, 0)  # of a copy that travels as it is, beside it
        if wrong := deviation(output.y, y_TM, roundings=4, terms=TOP_K * NEAR):
            return f"the sum of a token is {wrong}"
        if inputs.grad is None:
            return None
        found_TM, found_TK = output.grads
        if wrong := deviation(found_TM, x_TM, roundings=6, terms=TOP_K * NEAR):
            return f"the gradient of a token is {wrong}"
        if wrong := deviation(found_TK.flatten(), weight_TK.flatten(), roundings=6, terms=x_TM.shape[1]):
            return f"the gradient of a gate weight is {wrong}"
        return None


def _shared(of_T: "Tensor", near_T: "Tensor") -> "Tensor":
    """The sum over the tokens that are near to one another, at each of them."""
    return of_T.new_zeros(len(near_T), *of_T.shape[1:]).index_add_(0, near_T, of_T)[near_T]


def group_sizes(count: int, mean: int) -> Ints:
    """Sizes of groups, int64 `[G]`, that add up to `count`, and in which a row meets about `mean` rows, itself too.

    Notes
    -----
    Of G sizes that fall as an exponential does, s_i ~ -ln((i + 1/2) / G), the mean of s over rows is twice that over
    groups, hence G = 2 count / mean - 1, which is right for a single group, too.
    """
    number = max(1, round(2 * count / mean - 1))
    upto = np.cumsum(-np.log((np.arange(number) + 0.5) / number))
    sizes_G = np.diff(np.rint(upto / upto[-1] * count), prepend=0).astype(np.int64)
    return np.asarray(sizes_G[sizes_G > 0])
