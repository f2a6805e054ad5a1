"""The route of rows between devices, in pieces, and shipments on it: how many go where, some pieces at a time.

Rows are kept piece by piece, and within a piece by device. A chunk, some pieces in a row that are exchanged together,
travels device by device, as an all-to-all must.

Legend: P pieces; D devices; n rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...profilers.encoded import encoded
from ...profilers.exchanged import Exchange
from ..wire import Wire
from .payload import Columns
from .wire import Sealed


@dataclass(frozen=True, slots=True)
class Route:
    """Rows of each piece that go to and come from each device, `[P][D]`, which all ranks of the group agreed on."""

    sent: list[list[int]]
    received: list[list[int]]
    group: dist.ProcessGroup | None

    @classmethod
    def agree(
        cls, sent_PD: Tensor, group: dist.ProcessGroup | None, note: int | None = None
    ) -> tuple["Route", list[int]]:
        """The route when this rank sends `sent_PD` rows, int64, and the notes of all ranks; a collective call.

        Parameters
        ----------
        note
            What this rank tells all; None: nobody tells anything.
        """
        sent_DP = sent_PD.T.contiguous()
        if note is not None:
            sent_DP = torch.cat([sent_DP, torch.full_like(sent_DP[:, :1], note)], dim=1)
        received_DP = torch.empty_like(sent_DP)
        dist.all_to_all_single(received_DP, sent_DP, group=group)
        received = received_DP.T.tolist()
        notes = [] if note is None else received.pop()
        return cls(sent_PD.tolist(), received, group), notes

    @property
    def crossing(self) -> int:
        """Rows that this rank sends to other devices."""
        rank = dist.get_rank(self.group)
        return sum(sum(piece) - piece[rank] for piece in self.sent)

    def reversed(self) -> "Route":
        """The way back."""
        return Route(self.received, self.sent, self.group)

    def rows(self, pieces: range) -> slice:
        """Place of the rows sent in some pieces among all."""
        first = sum(map(sum, self.sent[: pieces.start]))
        return slice(first, first + sum(map(sum, self.sent[pieces.start : pieces.stop])))

    def staying(self, pieces: range) -> tuple[list[slice], list[slice]]:
        """Places of the rows of some pieces that stay on this device: among those sent, and in each piece received."""
        rank, start, sent = dist.get_rank(self.group), 0, list[slice]()
        for counts in self.sent[pieces.start : pieces.stop]:
            first = start + sum(counts[:rank])
            sent.append(slice(first, first + counts[rank]))
            start += sum(counts)
        received = [(sum(counts[:rank]), counts[rank]) for counts in self.received[pieces.start : pieces.stop]]
        return sent, [slice(first, first + count) for first, count in received]

    def start(self, rows: Tensor, pieces: range) -> "Pending":
        """Send the rows of some pieces, in kept order; a collective call that does not wait."""
        sent, received = self.sent[pieces.start : pieces.stop], self.received[pieces.start : pieces.stop]
        if len(pieces) == 1:
            travelling, gone, come = rows, sent[0], received[0]
        else:
            travelling = torch.cat(_transposed(rows, sent))
            gone, come = (list(map(sum, zip(*counts, strict=True))) for counts in (sent, received))
        arrived = rows.new_empty(sum(come), *rows.shape[1:])
        under_way = Exchange.start(arrived, travelling, come, gone, self.group)
        return Pending(under_way, arrived, travelling, received)

    def move(self, rows: Tensor) -> Tensor:
        """Rows that arrive where all are sent in one piece, in rank order; a collective call."""
        (arrived,) = self.start(rows.contiguous(), range(1)).wait()
        return arrived


@dataclass(slots=True)
class Pending:
    """An exchange under way; what is sent is held until it has arrived."""

    exchange: Exchange | None
    arrived: Tensor
    sent: Tensor
    received: list[list[int]]

    def wait(self) -> list[Tensor]:
        """The rows that arrived, by piece."""
        if self.exchange is not None:
            self.exchange.wait()
        self.exchange, self.sent = None, self.arrived
        if len(self.received) == 1:
            return [self.arrived]
        return _transposed(self.arrived, [list(counts) for counts in zip(*self.received, strict=True)])


@dataclass(frozen=True, slots=True)
class Shipment:
    """Columns under way."""

    columns: Columns
    pending: Pending
    sealed: Sealed | None  #: How the first column arrives as it was; None: it travels as it is

    @classmethod
    def send(
        cls,
        route: Route,
        pieces: range,
        kinds: Sequence[Sequence[Tensor]],
        *,
        wire: Wire | None = None,
        waits: bool = False,
    ) -> "Shipment":
        """Send columns that lie piece by piece, hidden vectors first; a collective call that waits only where told to.

        Parameters
        ----------
        wire
            The form in which hidden vectors travel to other devices; None: as they are.
        """
        kind, sealed = joined(kinds), None
        if wire is not None:
            sealed = Sealed.of(kind[0], *route.staying(pieces))
            kind[0] = encoded(kind[0])
        columns = Columns.of(*kind)
        pending = route.start(columns.pack(*kind), pieces)
        if waits:
            pending.wait()
        return cls(columns, pending, sealed)

    def wait(self) -> Sequence[Sequence[Tensor]]:
        """The columns of each piece that arrived."""
        pieces = [self.columns.unpack(rows) for rows in self.pending.wait()]
        if self.sealed is None:
            return pieces
        return [[self.sealed.opened(number, hidden), *beside] for number, (hidden, *beside) in enumerate(pieces)]


def joined(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The columns of pieces, one behind the other."""
    return [kind[0] if len(kind) == 1 else torch.cat(kind) for kind in zip(*pieces, strict=True)]


def _transposed(rows: Tensor, counts: list[list[int]]) -> list[Tensor]:
    """Rows laid out by first, then second index of `counts`, gathered by the second index."""
    blocks = torch.split(rows, [count for inner in counts for count in inner])
    if len(counts) == 1:
        return [*blocks]
    width = len(counts[0])
    return [torch.cat(blocks[place::width]) for place in range(width)]
