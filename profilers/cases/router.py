"""The gate of an MoE layer, every rank at the same time.

Legend: T tokens; M hidden size; E experts of the model; K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .case import Alone, Grid, Grids
from .precision import deviation, normal

if TYPE_CHECKING:
    from torch import Tensor

GRIDS = Grids(
    quick_cpu=Grid({"tokens": (64, 2048), "hidden": (64, 1024), "experts": (8, 256), "top_k": (1, 8)}, most=2**30),
    cpu=Grid(
        {"tokens": (16, 128, 1024, 8192), "hidden": (64, 256, 1024), "experts": (8, 64, 256), "top_k": (1, 2, 8)},
        most=2**31,
    ),
    quick_cuda=Grid(
        {"tokens": (16, 512, 4096), "hidden": (1024, 8192), "experts": (8, 256), "top_k": (1, 8)}, most=2**41
    ),
    cuda=Grid(
        {"tokens": (16, 256, 4096, 32768), "hidden": (1024, 8192), "experts": (8, 64, 256), "top_k": (1, 4, 8)},
        most=2**41,
    ),
)
CHECKED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Gate:
    """Tokens `[T, M]`, the gate's weights `[M, E]`, and K."""

    x: "Tensor"
    weight: "Tensor"
    top_k: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Weights `[T, K]`, float32, largest first, and the experts they belong to, int64 `[T, K]`."""

    weights: "Tensor"
    experts: "Tensor"


class Router(Alone):
    """Linear, softmax in float32 and top-k; the work is the T M E multiply-adds of the first."""

    name = "router"
    unit = "macs"
    grids = GRIDS
    halved = True

    def dtypes(self, device: str) -> Sequence[str]:
        """Dtypes of gates: fp32 on CPU, bf16 and fp32 on CUDA."""
        return ("fp32",) if device == "cpu" else ("bf16", "fp32")

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of the linear map."""
        return size["tokens"] * size["hidden"] * size["experts"]

    def prepare(self, size: Size, dtype: str, world: World) -> Gate:
        """Normal tokens and weights that keep their scale, seeded by the rank."""
        drawn, hidden = normal(world, dtype), size["hidden"]
        x_TM = drawn(size["tokens"], hidden)
        return Gate(x_TM, drawn(hidden, size["experts"]).mul_(hidden**-0.5), size["top_k"])

    def run(self, inputs: Gate) -> Choice:
        """Each token's experts."""
        import torch

        share_TE = (inputs.x @ inputs.weight).softmax(-1, dtype=torch.float32)
        return Choice(*share_TE.topk(inputs.top_k, dim=-1))

    def check(self, inputs: Gate, output: Choice, world: World) -> str | None:
        """Check the last tokens: K experts each, their weights, and the K largest weights that float64 gives."""
        weight_TK, expert_TK = output.weights[-CHECKED_ROWS:], output.experts[-CHECKED_ROWS:]
        num_experts = inputs.weight.shape[1]
        if not bool(((expert_TK >= 0) & (expert_TK < num_experts)).all()):
            return f"expert {int(expert_TK.max())} of {num_experts}"
        if bool((expert_TK.sort(-1).values.diff() == 0).any()):
            return "a token with one expert twice"
        exact_TE = (inputs.x[-CHECKED_ROWS:].double() @ inputs.weight.double()).softmax(-1)
        rounded = weight_TK.to(inputs.x.dtype)  # as the logits were
        for exact_TK in (exact_TE.gather(-1, expert_TK), exact_TE.topk(inputs.top_k).values):
            if wrong := deviation(rounded, exact_TK, roundings=4, terms=inputs.weight.shape[0]):
                return f"weights {wrong}"
        return None
