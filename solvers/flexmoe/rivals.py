"""Rules beside the policy: placements that stay, EPLB every so many records, and the paper's scheduler."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...profilers.cluster import Cluster
from .. import eplb
from ..arrays import Ints
from ..moves import best_labels
from .follow import Seen


@dataclass(frozen=True, slots=True)
class Stay:
    """Placements that never change."""

    window: int = 1

    def __call__(self, seen: Seen) -> Ints | None:
        """None."""
        return None


@dataclass(frozen=True, slots=True)
class EveryEplb:
    """EPLB of the last record every so many records."""

    every: int
    matched: bool = False  #: Whether devices are renamed so that few experts move
    method: Literal["published", "refined"] = "published"
    window: int = 1

    def __call__(self, seen: Seen) -> Ints | None:
        """EPLB's table, where it is time for it."""
        if (seen.record + 1) % self.every:
            return None
        return eplb_table(seen, self.method, matched=self.matched)


@dataclass(frozen=True, slots=True)
class Paper:
    """FlexMoE's Algorithms 1 to 3, corrected."""

    threshold: float = 1.2
    all_shrink: bool = False  #: Whether every expert with replicas may shrink
    window: int = 1

    def __call__(self, seen: Seen) -> Ints | None:
        """Algorithm 1's table, where the balance is above the threshold."""
        from .paper import scheduled

        if seen.balance <= self.threshold:
            return None
        pairs = np.ascontiguousarray(seen.window[-1].sum(axis=0))
        table: Ints = scheduled(seen.table, pairs, seen.group, seen.costs, self.threshold, self.all_shrink)
        return table


def eplb_table(seen: Seen, method: Literal["published", "refined"], *, matched: bool) -> Ints:
    """EPLB's table `[D, S]` for the mean of a window."""
    num_devices, width = seen.table.shape
    loads = seen.window.sum(axis=(0, 1, 3)).astype(np.float64)
    placed = eplb.solve(loads[None], Cluster(1, num_devices), slots=width, method=method).placement
    table = placed.physical_to_logical[0].astype(np.int64).reshape(num_devices, width)
    if not matched:
        return table
    kept_DD = (table[:, None, :, None] == seen.table[None, :, None, :]).any(axis=3).sum(axis=2).astype(np.float64)
    renamed = np.empty_like(table)
    renamed[best_labels(kept_DD, np.full(num_devices, width), 1)] = table
    return renamed
