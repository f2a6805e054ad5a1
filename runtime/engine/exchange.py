"""Rows between devices: the all-to-all with split sizes.

Legend: D devices.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Splits"]


@dataclass(frozen=True, slots=True)
class Splits:
    """How many rows go to and come from each device of a group, which all its ranks agreed on."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup | None

    @classmethod
    def agree(cls, sent_D: Tensor, group: dist.ProcessGroup | None) -> "Splits":
        """The splits when this rank sends `sent_D` rows, int64 `[D]`; a collective call."""
        received_D = torch.empty_like(sent_D)
        dist.all_to_all_single(received_D, sent_D, group=group)
        return cls(sent_D.tolist(), received_D.tolist(), group)

    @property
    def crossing(self) -> int:
        """Rows that this rank sends to other devices."""
        return sum(self.sent) - self.sent[dist.get_rank(self.group)]

    def move(self, rows: Tensor) -> Tensor:
        """The rows from every device in rank order, for rows `[sum(sent), ...]` in rank order; outside autograd."""
        received = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), self.received, self.sent, self.group)
        return received
