"""Replicas by the exact split of a step: the busiest device computes as little as can be, then the least travels.

Legend: E experts; D devices; T tokens; K experts per token.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...profilers.stopwatch import lap
from ...solvers.placement import Placement
from .gather import all_gather
from .loads import Counts
from .watch import naming_lost_ranks

if TYPE_CHECKING:
    from ...solvers.quota import Holders


@dataclass(frozen=True, eq=False)
class StepQuota:
    """The split of the token-expert pairs of a layer, which every rank finds alike."""

    holders: "Holders"
    far_cost: int  #: Of a pair that crosses nodes, in pairs that cross devices
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        placement: Placement,
        layer: int,
        devices_per_node: int,
        far_cost: int,
        group: dist.ProcessGroup | None,
    ) -> "StepQuota":
        """The split under a layer of a placement."""
        from ...solvers.quota import holders_of

        row_P = placement.physical_to_logical[layer]
        holders = holders_of(row_P, placement.slots, placement.num_experts, devices_per_node)
        return cls(holders, far_cost, group)

    @naming_lost_ranks()
    def choose(self, ids_TK: Tensor) -> tuple[Tensor, Counts]:
        """The device of each of this rank's pairs, int64 `[T, K]`, and the counts of all; a collective call.

        The pairs of an expert take turns, so that every piece of a step is split alike.
        """
        from ...solvers.quota import in_turn, split

        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        with lap("dispatch"):
            count_E = ids_TK.flatten().bincount(minlength=len(self.holders.first) - 1).int()
            count_DE = count_E.new_empty(size * len(count_E))
            work = all_gather(count_DE, count_E, self.group)
            if work is not None:
                work.wait()
            pairs_ED = np.ascontiguousarray(count_DE.view(size, -1).T.cpu().numpy(), np.int64)
            dealt_PD, busiest = split(pairs_ED, self.holders, self.far_cost)
            _, device_Q = in_turn(np.ascontiguousarray(dealt_PD[:, rank : rank + 1]), self.holders)
            device_TK = torch.empty_like(ids_TK).flatten()
            device_TK[ids_TK.flatten().argsort(stable=True)] = torch.from_numpy(device_Q).to(ids_TK)
            return device_TK.view_as(ids_TK), Counts(pairs_ED, busiest)
