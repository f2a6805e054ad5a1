"""Traffic between devices during one forward, and the routes of a trip that it is summed up from."""

import itertools
import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import reduce
from typing import NamedTuple

from .payload import Columns
from .route import Route


@dataclass(frozen=True, slots=True)
class Traffic:
    """Vectors and bytes that one rank sent to other devices; sums over ranks are the totals of the step."""

    copies: int = 0  #: Hidden vectors sent, dispatch and combine: one per token and distinct remote device
    payload_bytes: int = 0  #: Their bytes
    #: Expert ids, gate weights and token numbers beside hidden vectors, keys and values; what ranks tell of their
    #: samples (`migrating`)
    ids_bytes: int = 0
    kv_bytes: int = 0  #: Keys and values *received* (`coherent`)
    #: Hidden vectors, or generated tokens, and token numbers sent home after the last layer (`coherent`)
    return_bytes: int = 0
    condensed: int = 0  #: Hidden vectors not sent, dispatch and combine, as others stood for them
    loads: tuple[int, ...] = ()  #: Token-expert pairs that this rank computed, one number a layer

    def __add__(self, later: "Traffic") -> "Traffic":
        return Traffic(*map(operator.add, astuple(self), astuple(later)))

    def then(self, later: "Traffic") -> "Traffic":
        """The sum with the traffic of a later forward; loads are added by layer, too."""
        loads = itertools.zip_longest(self.loads, later.loads, fillvalue=0)
        return replace(self + later, loads=tuple(map(sum, loads)))

    @classmethod
    def total(cls, parts: Iterable["Traffic"]) -> "Traffic":
        """The sum of traffic in order; loads are joined."""
        return reduce(operator.add, parts, cls())


class Sent(NamedTuple):
    """Routes of one trip and what travelled on them, kept small until somebody asks for the traffic."""

    #: out, on: of copies, and of their partial sums; None: these stayed where they were computed
    out: Route
    on: Route | None
    columns: Columns  #: Of a copy, the hidden vector first
    tag_bytes: int  #: Beside each partial sum
    pairs: int  #: Of tokens and experts, which this rank computed
    condensed: int = 0  #: Copies for which others travelled

    @property
    def traffic(self) -> Traffic:
        """Traffic from this rank to other devices."""
        x_bytes, *beside_bytes = self.columns.sizes
        out, on = self.out.crossing, 0 if self.on is None else self.on.crossing
        return Traffic(
            copies=out + on,
            payload_bytes=(out + on) * x_bytes,
            ids_bytes=out * sum(beside_bytes) + on * self.tag_bytes,
            condensed=2 * self.condensed,
            loads=(self.pairs,),
        )
