"""Rows between devices: the all-to-all with split sizes, and the dispatch of each token once per distinct device.

Legend: T tokens; K experts a token; M hidden size; D devices; n copies sent; m copies received.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .stopwatch import lap
from .traffic import Traffic

__all__ = ["Copies", "Splits", "dispatch"]


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


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies that one dispatch brought here, with what the combine needs to know.

    Parameters
    ----------
    splits
        Copies sent to and received from each device.
    row
        The token of each copy sent, int64 `[n]`, grouped by destination.
    x
        Hidden vectors received, `[m, M]`.
    ids
        The experts asked of this device, int32 `[m, K]`; -1 where another device computes.
    weight
        Gate weights, `[m, K]`.
    tags
        What the sender wrote beside each token, int32 `[m, ...]`.
    """

    splits: Splits
    row: Tensor
    x: Tensor
    ids: Tensor
    weight: Tensor
    tags: Tensor

    @property
    def traffic(self) -> Traffic:
        """What the dispatch sent from here, and what it gives this device to compute."""
        return Traffic(
            copies=self.splits.crossing,
            payload_bytes=self.splits.crossing_bytes(self.x),
            ids_bytes=self.splits.crossing_bytes(self.ids, self.weight, self.tags),
            loads=(int((self.ids >= 0).sum()),),
        )


def dispatch(
    x_TM: Tensor,
    ids_TK: Tensor,
    weight_TK: Tensor,
    device_TK: Tensor,
    group: dist.ProcessGroup | None,
    tags: tuple[Tensor, ...] = (),
) -> Copies:
    """What arrives here when every rank sends each token once to every distinct device among its experts'.

    Parameters
    ----------
    device_TK
        The device of each expert, int64.
    tags
        Integers `[T]` below 2**31 that travel beside the token.
    """
    (num_tokens, top_k), num_devices = ids_TK.shape, dist.get_world_size(group)
    wanted_TD = device_TK.new_zeros(num_tokens, num_devices, dtype=torch.bool).scatter_(1, device_TK, True)
    device_n, row_n = wanted_TD.T.nonzero(as_tuple=True)
    splits = Splits.agree(device_n.bincount(minlength=num_devices), group)
    asked_nK = ids_TK[row_n].where(device_TK[row_n] == device_n[:, None], -1)
    beside = torch.cat([asked_nK, *(tag[row_n, None] for tag in tags)], dim=1).to(torch.int32)
    beside, weight, x_nM = splits.exchange(beside), splits.exchange(weight_TK[row_n]), x_TM[row_n]
    with lap("dispatch"):
        x = splits.exchange(x_nM)
    return Copies(splits, row_n, x, beside[:, :top_k], weight, beside[:, top_k:])
