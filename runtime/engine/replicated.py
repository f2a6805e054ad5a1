"""The gradients of replicated experts: the sum over their holders, the same bits on each.

Legend: D devices; S slots of this device.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...solvers.placement import Placement
from .route import Route

__all__ = ["ReplicaSums"]


@dataclass(frozen=True, slots=True)
class ReplicaSums:
    """Slots of this device whose experts other devices hold, too.

    Parameters
    ----------
    shared
        The slots whose experts each device holds as well, int64, by device, in the order of the experts; for this
        device all that any other shares.
    """

    shared: tuple[Tensor, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, placement: Placement, layer: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> "ReplicaSums":
        """The shared slots of this rank in a layer."""
        rank, held_ED = dist.get_rank(group), torch.from_numpy(placement.holds(layer))
        here_S = held_ED[:, rank].nonzero().flatten()  # experts ascend on a device, so that slots do, too
        also_SD = held_ED[here_S]
        also_SD[:, rank] = also_SD.sum(dim=1) > 1
        return cls(tuple(also_S.nonzero().flatten().to(device) for also_S in also_SD.T), group)

    def summed(self, gradient: Tensor) -> Tensor:
        """A gradient `[S, ...]` with the rows of replicated experts summed over their holders, in rank order."""
        rank = dist.get_rank(self.group)
        counts = [len(slots) if peer != rank else 0 for peer, slots in enumerate(self.shared)]
        theirs = [slots for peer, slots in enumerate(self.shared) if peer != rank]
        rows = torch.split(Route([counts], [counts], self.group).move(gradient[torch.cat(theirs)]), counts)
        total = gradient.clone()
        total[self.shared[rank]] = 0
        for peer, slots in enumerate(self.shared):
            total.index_add_(0, slots, gradient[slots] if peer == rank else rows[peer])
        return total
