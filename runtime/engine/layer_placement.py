"""The placement of one layer, as a rank carries it out.

Legend: E experts; S slots of this rank; P slots of all devices.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...solvers.placement import Placement
from ...solvers.replicas import ReplicaTable
from .copies import Slots
from .replicated import ReplicaSums
from .routing import Replicas

__all__ = ["LayerPlacement"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlacement:
    """Places of a layer's experts, as this rank needs them to route tokens, compute and sum gradients.

    Parameters
    ----------
    held
        The experts in this rank's slots, `[S]`.
    slots
        The slots of all devices, P of them.
    replicas
        The devices that this rank's tokens may use.
    sums
        The gradients that holders of one expert add up; None where no expert has replicas.
    slot_of_expert
        The slot of each expert on this rank, -1 where another device holds it, int64 `[E + 1]`; the last entry
        answers the id -1.
    devices_per_node
        How many devices share the fast links.
    """

    held: list[int]
    slots: Slots
    replicas: Replicas
    sums: ReplicaSums | None
    slot_of_expert: Tensor
    devices_per_node: int

    @classmethod
    def of(
        cls,
        placement: Placement,
        layer: int,
        *,
        devices_per_node: int,
        group: dist.ProcessGroup | None,
        device: torch.device | str = "cpu",
    ) -> "LayerPlacement":
        """A layer of a placement over the ranks of `group`, as tensors on `device`."""
        rank, device = dist.get_rank(group), torch.device(device)
        held = placement.held(layer, rank)
        slot_of_expert = torch.full((placement.num_experts + 1,), -1, device=device)
        slot_of_expert[held] = torch.arange(len(held), device=device)
        return cls(
            held,
            Slots.of(placement, layer, device),
            Replicas.seen_from(rank, ReplicaTable.of(placement, layer, devices_per_node), device),
            ReplicaSums.of(placement, layer, group, device) if placement.has_replicas else None,
            slot_of_expert,
            devices_per_node,
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.slot_of_expert) - 1
