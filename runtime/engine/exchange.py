"""Rows between devices: the all-to-all with split sizes.

Legend: D devices.
"""

from dataclasses import dataclass
from typing import Any

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

    @classmethod
    def to_all(cls, rows: Tensor, group: dist.ProcessGroup | None) -> "Splits":
        """The splits when every rank sends all its rows, uneven, to every rank; a collective call."""
        return cls.agree(torch.full((dist.get_world_size(group),), len(rows), device=rows.device), group)

    @property
    def crossing(self) -> int:
        """Rows that this rank sends to other devices."""
        return sum(self.sent) - self.sent[dist.get_rank(self.group)]

    def crossing_bytes(self, *rows: Tensor) -> int:
        """Bytes that this rank sends to other devices when it exchanges rows like each of these."""
        return self.crossing * sum(kind.shape[1:].numel() * kind.element_size() for kind in rows)

    def reversed(self) -> "Splits":
        """The way back."""
        return Splits(self.received, self.sent, self.group)

    def exchange(self, rows: Tensor) -> Tensor:
        """The rows from every device in rank order, for rows `[sum(sent), ...]` in rank order; differentiable."""
        received: Tensor = _AllToAll.apply(rows, self)  # type: ignore[no-untyped-call]
        return received

    def exchange_all(self, rows: Tensor) -> Tensor:
        """The rows of all ranks in rank order, on every rank, where the splits are `to_all`."""
        return self.exchange(rows.repeat(len(self.sent), *(1 for _ in rows.shape[1:])))

    def move(self, rows: Tensor) -> Tensor:
        """The same, outside autograd."""
        received = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), self.received, self.sent, self.group)
        return received


class _AllToAll(torch.autograd.Function):
    """The all-to-all, whose gradient is the all-to-all back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Splits) -> Tensor:
        ctx.splits = splits
        return splits.move(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.splits.reversed().move(grads[0]), None
