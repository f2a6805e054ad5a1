"""When replicas follow the load, and how: the trigger, the horizon, and the search for a placement that pays.

Legend: W records of the window; M micro-batches; E experts; D devices, S slots of each.
"""

from dataclasses import dataclass

import numpy as np

from ..arrays import Ints
from .costs import Costs
from .follow import Seen, step_seconds


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule for `follow`: after a record out of balance, the placement that saves most within the horizon.

    Planned for the records of the window as a set, never for their mean or trend.
    """

    trigger: float = 1.02  #: Max/mean of the last record under the exact split, above which it plans
    every: int = 0  #: Records after which it plans even so, the layers in turn; 0: never
    horizon: float = 100.0  #: Steps over which a move must pay
    window: int = 4  #: Records
    slack: float = 0.002  #: How much more than the mean a device may have before operations are looked for
    evaluations: int = 150  #: Of the search by seconds; 0: balance alone
    heat_s: float = 2e-6  #: Of the search

    def __call__(self, seen: Seen) -> Ints | None:
        """The table of least seconds found, if what it saves within the horizon exceeds the price of its moves."""
        due = self.every and (seen.record + seen.layer) % self.every == 0
        if seen.balance <= self.trigger and not due:
            return None
        table = planned(seen, self)
        return table if pays(table, seen, self.horizon) else None


def planned(seen: Seen, policy: Policy) -> Ints:
    """A table for the records of a window: few operations for balance, then the search by seconds."""
    from .cuts import guided
    from .search import Search, searched
    from .state import holds

    pairs = np.ascontiguousarray(seen.window.sum(axis=1))
    totals = pairs.sum(axis=2)
    costs, num_devices = seen.costs, len(seen.table)
    gain_s = costs.pair_s * totals.sum(axis=1).mean() / num_devices * policy.horizon
    cell_s = 0.0 if costs.replicas_free else costs.moved_bytes * costs.intra_sum_s_per_byte
    table, _ = guided(seen.table, totals, policy.slack, gain_s, cell_s)
    if policy.evaluations:
        origin = holds(seen.table, pairs.shape[1])
        task = Search.of(
            pairs, seen.window.shape[1], origin, seen.home, seen.group, costs, policy.horizon
        )
        seed = np.array([seen.record + 1], np.uint64)
        table, _ = searched(table, task, policy.evaluations, policy.heat_s, seed)
    return table


def pays(table: Ints, seen: Seen, horizon: float) -> bool:
    """Whether a table saves more on the window, times the horizon, than its moves cost."""
    saved = np.mean(
        [
            step_seconds(batches, seen.table, seen.costs, seen.group)
            - step_seconds(batches, table, seen.costs, seen.group)
            for batches in seen.window
        ]
    )
    return bool(saved * horizon > price_of(table, seen))


def price_of(table: Ints, seen: Seen) -> float:
    """Seconds of the moves that lead to a table."""
    from .state import holds, homes_after, moves_seconds, transfers

    before, after = (holds(one, len(seen.home)) for one in (seen.table, table))
    moved = homes_after(seen.home, after, seen.group)
    sent = transfers(before, after, seen.home, moved, seen.costs, seen.group)
    return float(moves_seconds(sent, len(table), seen.costs, seen.group))
