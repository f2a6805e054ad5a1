"""All-gathers of rows whose number differs by rank, and of any objects.

Legend: n rows of this rank; D devices.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MismatchError, MoeplanError
from ...profilers.exchanged import Exchange
from .payload import Columns

T = TypeVar("T")


@dataclass(slots=True)
class Count:
    """Numbers of rows of all ranks, under way."""

    work: dist.Work | None
    counts: Tensor

    @classmethod
    def start(cls, num_rows: int, device: torch.device, group: dist.ProcessGroup | None) -> "Count":
        """Tell all ranks; a collective call that does not wait."""
        counts_D = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        return cls(all_gather(counts_D, torch.tensor([num_rows], device=device), group), counts_D)

    def wait(self) -> list[int]:
        """The rows of each rank, `[D]`."""
        if self.work is not None:
            self.work.wait()
        counts: list[int] = self.counts.tolist()
        return counts


@dataclass(slots=True)
class Gather:
    """Columns of all ranks under way, padded to the most rows of any where the backend gathers them."""

    work: dist.Work | Exchange | None
    arrived: Tensor
    sent: Tensor
    columns: Columns
    counts: list[int]
    received_rows: int  #: From other ranks, padding left out

    @classmethod
    def start(
        cls, counts: list[int], group: dist.ProcessGroup | None, *kinds: Tensor, devices_per_node: int | None = None
    ) -> "Gather":
        """Send these columns `[n, width]` to all; a collective call that does not wait, and none where nobody has rows.

        Parameters
        ----------
        counts
            The rows of each rank, `[D]`.
        devices_per_node
            Ranks of each node: on the CPU rows reach a node once, and are not padded. None: by the backend's
            all-gather, for little, as it takes less of the CPU.
        """
        columns, most = Columns.of(*kinds), max(counts)
        rows = columns.pack(*kinds)
        received_rows = sum(counts) - len(rows)
        if devices_per_node is not None and rows.device.type == "cpu":
            arrived = rows.new_empty(sum(counts), rows.shape[1])
            under_way = Exchange.gather(arrived, rows, counts, devices_per_node, group) if most else None
            return cls(under_way, arrived, rows, columns, counts, received_rows)
        sent = rows.new_zeros(most, rows.shape[1])
        sent[: len(rows)] = rows
        arrived = rows.new_empty(len(counts) * most, rows.shape[1])
        work = all_gather(arrived, sent, group) if most else None
        return cls(work, arrived, sent, columns, counts, received_rows)

    def wait(self) -> list[Tensor]:
        """The columns of all ranks, in rank order."""
        if self.work is not None:
            self.work.wait()
        self.work, self.sent, rows = None, self.arrived, self.arrived
        if len(rows) > sum(self.counts):
            by_rank = rows.view(len(self.counts), max(self.counts), rows.shape[1])
            rows = torch.cat([part[:count] for part, count in zip(by_rank, self.counts, strict=True)])
        return self.columns.unpack(rows)


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks, by rank; pickled, a collective call that waits."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(value: str, what: str, group: dist.ProcessGroup | None) -> None:
    """Raise MismatchError on every rank where ranks hold different values of what is named; a collective call."""
    held = gathered(hashlib.sha256(value.encode()).hexdigest(), group)
    if others := [rank for rank, one in enumerate(held) if one != held[0]]:
        raise MismatchError(f"rank {others[0]} holds another {what} than rank 0; give all the same")


@contextlib.contextmanager
def together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise on every rank what the block raises on any; a collective call."""
    problem: MoeplanError | None = None
    try:
        yield
    except MoeplanError as error:
        problem = error
    for rank, theirs in enumerate(gathered(problem, group)):
        if theirs is not None:
            raise type(theirs)(f"rank {rank}: {theirs}") from None


def all_gather(arrived: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start an all-gather of equal tensors; a collective call that does not wait."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
    work: dist.Work | None = gather(arrived, sent, group=group, async_op=True)
    return work
