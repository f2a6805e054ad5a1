"""The compute of a routed block as `runtime` runs it, every rank at the same time.

Legend: T token-expert pairs of the busiest rank, P of this one; E experts of a rank, K per token; M hidden size;
H expert FFN size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..measurement import Size
from ..world import World
from .case import Alone, Grid, Grids
from .precision import deviation, float_dtypes, normal, torch_dtype
from .routing import pairs_DE

if TYPE_CHECKING:
    from torch import Tensor

Values = tuple[int, ...]


def _axes(tokens: Values, experts: Values, hidden: Values, ffn: Values) -> dict[str, Values]:
    return {"tokens": tokens, "experts": experts, "hidden": hidden, "ffn": ffn}


GRIDS = Grids(
    quick_cpu=Grid(_axes((64, 512, 2048, 8192, 16384, 32768), (4, 32), (128, 1024), (40, 256)), most=2**29),
    cpu=Grid(_axes((64, 512, 4096, 16384), (2, 8, 32), (128, 512, 1024), (32, 256, 1024)), most=2**30),
    quick_cuda=Grid(_axes((32, 1024, 32768), (2, 32), (1024, 4096), (512, 4096)), most=2**41),
    cuda=Grid(_axes((32, 256, 2048, 16384, 65536), (2, 8, 32), (1024, 2048, 4096), (512, 2048, 4096)), most=2**41),
)
TOP_K = 2
BESIDE = 2 * TOP_K  # elements beside a hidden vector in a row that has arrived: its gate weights and ids


@dataclass(frozen=True, slots=True)
class Block:
    """Rows as they arrive `[P, M]`, in wider ones; what they ask for, and the experts.

    A row asks K experts, of which one is here; experts have gate above up `[E, 2 H, M]`, and down `[E, M, H]`.
    """

    x: "Tensor"
    slot: "Tensor"  #: `[P, K]`, -1 where another rank computes
    weight: "Tensor"  #: `[P, K]`
    w_in: "Tensor"
    w_out: "Tensor"


class RoutedBlock(Alone):
    """Gather, local experts as the runtime runs them (`routed.weighted_experts`), gate weighting and scatter.

    Work: 3 T M H multiply-adds of the busiest rank.
    Experts have the popularities of `routing`, so that ranks and experts have unequal numbers of tokens.
    """

    name = "routed_block"
    unit = "macs"
    grids = GRIDS
    halved = True
    curve = "tokens"  # gathers and page faults decide at small shapes, multiply-adds at large ones

    def dtypes(self, device: str) -> Sequence[str]:
        """Dtypes of models."""
        return float_dtypes(device)

    def work(self, size: Size, num_ranks: int) -> int:
        """Multiply-adds of the busiest rank's three projections."""
        return 3 * size["tokens"] * size["hidden"] * size["ffn"]

    def prepare(self, size: Size, dtype: str, world: World) -> Block:
        """Normal tokens in random order, gate weights and weights that keep their scale, seeded by the rank."""
        import torch

        drawn, experts, hidden, ffn = normal(world, dtype), size["experts"], size["hidden"], size["ffn"]
        count_E = torch.from_numpy(pairs_DE(world.size, experts, size["tokens"])[world.rank])
        slot_P = torch.arange(experts).repeat_interleave(count_E)
        pairs, generator = len(slot_P), torch.Generator().manual_seed(world.rank)
        slot_PK = torch.full((pairs, TOP_K), -1)
        slot_PK[torch.arange(pairs), torch.arange(pairs) % TOP_K] = slot_P[torch.randperm(pairs, generator=generator)]
        weight_PK = torch.rand(pairs, TOP_K, generator=generator) + 0.5
        return Block(
            drawn(pairs, hidden + BESIDE)[:, :hidden],
            slot_PK.to(world.device),
            weight_PK.to(world.device, torch_dtype(dtype)),
            drawn(experts, 2 * ffn, hidden).mul_(hidden**-0.5),
            drawn(experts, hidden, ffn).mul_(ffn**-0.5),
        )

    def run(self, inputs: Block) -> "Tensor":
        """The weighted sum of each row's experts here, `[P, M]`."""
        from ..routed import partial_sums, weighted_experts

        def experts(x_PM: "Tensor", slot_P1: "Tensor", weight_P1: "Tensor") -> "Tensor":
            return weighted_experts(x_PM, slot_P1, weight_P1, inputs.w_in, inputs.w_out)

        return partial_sums(experts, inputs.x, inputs.slot, inputs.weight)[0]

    def check(self, inputs: Block, output: "Tensor", world: World) -> str | None:
        """Compare every expert's last row with float64: gate, up, their product, the output and its weighting."""
        from torch.nn import functional

        ffn = inputs.w_out.shape[2]
        here_P = inputs.slot.max(dim=1)
        for expert, (w_in, w_out) in enumerate(zip(inputs.w_in, inputs.w_out, strict=True)):
            rows = (here_P.values == expert).nonzero().flatten()[-1:]
            gate, up = (inputs.x[rows].double() @ w_in.double().T).split(ffn, dim=-1)
            weight = inputs.weight[rows, here_P.indices[rows], None].double()
            exact = weight * ((functional.silu(gate) * up) @ w_out.double().T)
            terms = max(inputs.x.shape[1], ffn)
            if wrong := deviation(output[rows], exact, roundings=5, terms=terms):
                return f"expert {expert} {wrong}"
        return None
