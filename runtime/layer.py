"""The expert-parallel MoE layer: this rank's experts of one layer, in the dispatch model `standard`.

Legend: T tokens; K experts a token; M hidden size; E experts; m copies received.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..solvers.placement import Placement
from ..solvers.replicas import ReplicaTable
from .exchange import Copies, dispatch
from .experts import keep_experts, partial_sums
from .model import Experts, MoE, Router
from .routing import Replicas, RoutedTokens
from .stopwatch import lap
from .traffic import Traffic

__all__ = ["ExpertParallelMoE"]


class ExpertParallelMoE(nn.Module):
    """A routed block whose experts are spread over the ranks of `group` by a placement.

    Its forward is `standard`: tokens travel to their experts' devices and return. Gradients of replicas of an expert
    are not summed.

    Parameters
    ----------
    moe
        The whole block; its router is kept as it is, its experts are cut down to this rank's.
    layer
        The ordinal of the block among MoE layers.

    Attributes
    ----------
    routed, traffic
        What the last forward routed and sent.
    """

    router: Router
    experts: Experts
    routed: RoutedTokens
    traffic: Traffic

    def __init__(
        self, moe: MoE, placement: Placement, layer: int, *, devices_per_node: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        rank, device = dist.get_rank(group), moe.experts.w_in.device
        held = placement.physical_to_logical[layer, placement.device_of_slot == rank].tolist()
        self.group = group
        self.router, self.experts = moe.router, moe.experts
        self.replicas = Replicas.seen_from(rank, ReplicaTable.of(placement, layer, devices_per_node), device)
        # The last entry answers the id -1.
        self.slot_of_expert = torch.full((placement.num_experts + 1,), -1, device=device)
        self.slot_of_expert[held] = torch.arange(len(held), device=device)
        keep_experts(self.experts, held)

    def begin(self, sample_T: Tensor, position_T: Tensor) -> None:
        """Say which tokens the next forward is about, int64 `[T]`."""
        self.sample, self.position = sample_T, position_T

    def forward(self, x: Tensor) -> Tensor:
        """`[..., M]` to `[..., M]`; all ranks call it together."""
        x_TM = x.flatten(0, -2)
        ids_TK, weight_TK, device_TK = self.route(x_TM)
        copies = dispatch(x_TM, ids_TK, weight_TK, device_TK, self.group)
        back = copies.splits.reversed()
        partial_mM = self.contributions(copies, copies.x)
        with lap("combine"):
            partial_nM = back.exchange(partial_mM)
        self.traffic = copies.traffic + Traffic(back.crossing, back.crossing_bytes(partial_nM))
        return torch.zeros_like(x_TM).index_add(0, copies.row, partial_nM).view_as(x)

    def route(self, x_TM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expert ids, gate weights and the experts' devices of tokens that this rank holds, each `[T, K]`."""
        weight_TK, ids_TK = self.router(x_TM)
        self.routed = RoutedTokens(self.sample, self.position, ids_TK)
        return ids_TK, weight_TK, self.replicas.choose(ids_TK, self.sample + self.position)

    def contributions(self, copies: Copies, x_mM: Tensor) -> Tensor:
        """What this rank's experts add to the tokens of the copies it received, `[m, M]`."""
        return partial_sums(self.experts, x_mM, self.slot_of_expert[copies.ids.long()], copies.weight)
