"""Rules beside the policy: placements that stay, EPLB every so many records, and the paper's scheduler."""

from dataclasses import dataclass

import numpy as np

from ...profilers.cluster import Cluster
from .. import eplb
from ..arrays import Ints
from ..eplb import Method
from ..moves import best_labels
from .follow import Seen


@dataclass(frozen=True, slots=True)
class Stay:
    """Placements that never change."""

    window: int = 1

    def __call__(self, seen: Seen) -> Ints | None:
        """Keep the placement."""
        return None


@dataclass(frozen=True, slots=True)
class EveryEplb:
    """EPLB of the last record every so many records."""

    every: int
    matched: bool = False  #: Whether devices are renamed so that few experts move
    method: Method = "published"
    window: int = 1

    def __call__(self, seen: Seen) -> Ints | None:
        """EPLB's table, where it is time for it."""
        if (seen.record + 1) % self.every:
            return None
        return eplb_table(seen.window, seen.table.shape[1], self.method, seen.table if self.matched else None)


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


def eplb_table(window: Ints, slots: int, method: Method, matched: Ints | None = None) -> Ints:
    """EPLB's table `[D, S]` for the sum of a window `[W, M, E, D]`.

    `matched`: the table from which few experts shall move: devices are renamed.
    """
    num_devices = window.shape[3]
    loads = window.sum(axis=(0, 1, 3)).astype(np.float64)
    placed = eplb.solve(loads[None], Cluster(1, num_devices), slots=slots, method=method).placement
    table: Ints = placed.physical_to_logical[0].astype(np.int64).reshape(num_devices, slots)
    if matched is None:
        return table
    kept_DD = (table[:, None, :, None] == matched[None, :, None, :]).sum(axis=(2, 3)).astype(np.float64)
    renamed: Ints = np.empty_like(table)
    renamed[best_labels(kept_DD, np.full(num_devices, slots), 1)] = table
    return renamed
