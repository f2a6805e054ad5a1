"""The feed-forward experts of one device, every rank at the same time.

Legend: T token-expert pairs of the device, shared evenly; E its experts; M hidden size; H expert FFN size; G = 2 H.
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

Values = tuple[int, ...]


def _axes(tokens: Values, experts: Values, hidden: Values, ffn: Values) -> dict[str, Values]:
    return {"tokens": tokens, "experts": experts, "hidden": hidden, "ffn": ffn, "grouped": (0, 1)}


SIDE = (64, 256, 1024)
GRIDS = Grids(
    quick_cpu=Grid(_axes((64, 256, 4096), (2, 8), (64, 1024), (64, 256)), most=2**28),
    cpu=Grid(_axes((64, 256, 1024, 8192), (2, 8, 32), SIDE, SIDE), most=2**31),
    quick_cuda=Grid(_axes((32, 1024, 32768), (2, 32), (1024, 4096), (512, 4096)), most=2**41),
    cuda=Grid(_axes((32, 256, 2048, 16384, 65536), (2, 8, 32), (1024, 2048, 4096), (512, 2048, 4096)), most=2**41),
)


@dataclass(frozen=True, slots=True)
class Experts:
    """Tokens of every expert `[E, T/E, M]`, gate and up projections beside each other `[E, M, G]`, down `[E, H, M]`."""

    x: "Tensor"
    w_in: "Tensor"
    w_out: "Tensor"
    grouped: bool


class ExpertFfn(Alone):
    """down(silu(gate(x)) up(x)) of all local experts; the work is the 3 T M H multiply-adds of the projections.

    Grouped, all experts go through one batched product (`torch.bmm` over equal splits) for gate and up and one for
    down; looped, through two products an expert, one expert after another.
    """

    name = "expert_ffn"
    unit = "macs"
    grids = GRIDS
    halved = True

    def dtypes(self, device: str) -> Sequence[str]:
        """Dtypes of models; no fp8, which `torch.bmm` does not take."""
        return float_dtypes(device)

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of the three projections."""
        return 3 * size["tokens"] * size["hidden"] * size["ffn"]

    def prepare(self, size: Size, dtype: str, world: World) -> Experts:
        """Normal tokens and weights that keep their scale, seeded by the rank."""
        drawn, experts, hidden, ffn = normal(world, dtype), size["experts"], size["hidden"], size["ffn"]
        return Experts(
            drawn(experts, size["tokens"] // experts, hidden),
            drawn(experts, hidden, 2 * ffn).mul_(hidden**-0.5),
            drawn(experts, ffn, hidden).mul_(ffn**-0.5),
            grouped=bool(size["grouped"]),
        )

    def run(self, inputs: Experts) -> "Tensor":
        """Every expert's outputs, `[E, T/E, M]`."""
        import torch

        if inputs.grouped:
            return _feed_forward(inputs.x, inputs.w_in, inputs.w_out)
        experts = zip(inputs.x, inputs.w_in, inputs.w_out, strict=True)
        return torch.stack([_feed_forward(x_TM, w_MG, w_HM) for x_TM, w_MG, w_HM in experts])

    def check(self, inputs: Experts, output: "Tensor", world: World) -> str | None:
        """Compare every expert's last row with float64: gate, up, their product and the output are rounded."""
        terms = max(inputs.w_in.shape[1], inputs.w_out.shape[1])
        for expert, (x_TM, w_MG, w_HM) in enumerate(zip(inputs.x, inputs.w_in, inputs.w_out, strict=True)):
            exact = _feed_forward(x_TM[-1:].double(), w_MG.double(), w_HM.double())
            if wrong := deviation(output[expert, -1:], exact, roundings=4, terms=terms):
                return f"expert {expert} {wrong}"
        return None


def _feed_forward(x: "Tensor", w_in: "Tensor", w_out: "Tensor") -> "Tensor":
    """`[..., T, M]` to `[..., T, M]`."""
    from torch.nn import functional

    gate, up = (x @ w_in).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ w_out
