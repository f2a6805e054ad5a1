"""Traffic between devices during one forward."""

import itertools
import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import reduce

__all__ = ["Traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Vectors and bytes that one rank sent to other devices; sums over ranks are the totals of the step.

    Parameters
    ----------
    copies
        Hidden vectors sent, dispatch and combine: one per token and distinct remote device.
    payload_bytes
        Their bytes.
    ids_bytes
        Expert ids, gate weights and token numbers beside hidden vectors, keys and values; what ranks tell of their
        samples (`migrating`).
    kv_bytes
        Keys and values *received* (`coherent`).
    return_bytes
        Hidden vectors, or generated tokens, and token numbers sent home after the last layer (`coherent`).
    loads
        Token-expert pairs that this rank computed, one number a layer.
    """

    copies: int = 0
    payload_bytes: int = 0
    ids_bytes: int = 0
    kv_bytes: int = 0
    return_bytes: int = 0
    loads: tuple[int, ...] = ()

    def __add__(self, later: "Traffic") -> "Traffic":
        return Traffic(*map(operator.add, astuple(self), astuple(later)))

    def then(self, later: "Traffic") -> "Traffic":
        """The sum with what a later forward sent, in which loads are added by layer, too."""
        loads = itertools.zip_longest(self.loads, later.loads, fillvalue=0)
        return replace(self + later, loads=tuple(map(sum, loads)))

    @classmethod
    def total(cls, parts: Iterable["Traffic"]) -> "Traffic":
        """The sum of traffic in order; loads are joined."""
        return reduce(operator.add, parts, cls())
