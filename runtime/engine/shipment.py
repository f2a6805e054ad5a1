"""A shipment: several kinds of columns on their way together, piece by piece.

Legend: n rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .payload import Columns
from .route import Pending, Route
from .stopwatch import Part, lap

__all__ = ["Awaited", "Landed", "Shipment", "joined"]


class Awaited(Protocol):
    """Columns that arrive, now or later."""

    def wait(self) -> Sequence[Sequence[Tensor]]:
        """The columns `[n, width]` of each piece."""
        ...


@dataclass(frozen=True, slots=True)
class Landed:
    """Columns that need not travel."""

    pieces: Sequence[Sequence[Tensor]]

    def wait(self) -> Sequence[Sequence[Tensor]]:
        """The columns, which are here."""
        return self.pieces


@dataclass(frozen=True, slots=True)
class Shipment:
    """Columns under way."""

    columns: Columns
    pending: Pending

    @classmethod
    def send(cls, part: Part, route: Route, pieces: range, columns: Columns, rows: Tensor) -> "Shipment":
        """Send the packed rows of some pieces, in kept order; a collective call, which waits only where it is timed."""
        with lap(part) as timed:
            pending = route.start(rows, pieces)
            if timed:
                pending.wait()
        return cls(columns, pending)

    @classmethod
    def gather(cls, part: Part, route: Route, pieces: range, kinds: Sequence[Sequence[Tensor]]) -> "Shipment":
        """Send columns that lie piece by piece, as `send` does."""
        columns = Columns.of(*kinds[0])
        return cls.send(part, route, pieces, columns, columns.pack(*joined(kinds)))

    def wait(self) -> Sequence[Sequence[Tensor]]:
        """The columns of each piece that arrived."""
        return [self.columns.unpack(rows) for rows in self.pending.wait()]


def joined(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The columns of pieces, one behind the other."""
    return [kind[0] if len(kind) == 1 else torch.cat(kind) for kind in zip(*pieces, strict=True)]
