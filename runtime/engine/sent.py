"""The routes of one trip, kept small until somebody asks for its traffic."""

from typing import NamedTuple

from .payload import Columns
from .route import Route
from .traffic import Traffic

__all__ = ["Sent"]


class Sent(NamedTuple):
    """The routes of a trip and what travelled on them.

    Parameters
    ----------
    out, on
        Of copies, and of their partial sums; None: these stayed where they were computed.
    columns
        Of a copy, the hidden vector first.
    tag_bytes
        Beside each partial sum.
    pairs
        Of tokens and experts, which this rank computed.
    """

    out: Route
    on: Route | None
    columns: Columns
    tag_bytes: int
    pairs: int

    @property
    def traffic(self) -> Traffic:
        """Traffic from this rank to other devices."""
        x_bytes, *beside_bytes = self.columns.sizes
        out, on = self.out.crossing, 0 if self.on is None else self.on.crossing
        return Traffic(
            copies=out + on,
            payload_bytes=(out + on) * x_bytes,
            ids_bytes=out * sum(beside_bytes) + on * self.tag_bytes,
            loads=(self.pairs,),
        )
