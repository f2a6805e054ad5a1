"""Policy by which replicas follow the load: the trigger, the horizon, and the search for a placement that pays.

Legend: W records of the window; M micro-batches; E experts; D devices, S slots of each.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Bools, Ints
from .follow import Seen, saving
from .rivals import eplb_table

BEYOND = 2.0  # times as far from their mean as the records of a window are, loads may drift
LONG = 10  # one search that is due in so many is so many times as long


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule for `follow`: after a record out of balance, the placement that saves most within the horizon.

    It plans for the latest records as a set, never for their mean or trend. What a search finds suits the records that
    it searched by better than any others, so that a longer window, over which a move must pay, holds back moves that
    follow nothing but chance.
    """

    trigger: float = 1.02  #: Max/mean of the last record under the exact split, above which it plans
    every: int = 2  #: Records after which it plans even so, the layers in turn; 0: never
    horizon: float = 100.0  #: Steps over which a move must pay
    window: int = 4  #: Records over which a move must pay
    recent: int = 4  #: The latest of them, which it plans for
    slack: float = 0.002  #: How much more than the mean a device may have before operations are looked for
    quantile: float = 0.0  #: Of the window's records, which counts; 0: their mean
    kicks: int = 30  #: Of the operations, where the ones that pay do not bring the balance below the trigger
    evaluations: int = 400  #: Of the search by seconds, of one in ten ten times as many; 0: balance alone

    def __call__(self, seen: Seen) -> Ints | None:
        """The table of least seconds found, if what it saves within the horizon exceeds the price of its moves."""
        turn, every = seen.record + seen.layer, self.every
        if seen.balance <= self.trigger and not (every and turn % every == 0):
            return None
        recent = replace(seen, window=seen.window[-self.recent :])
        if not recent.window.any():
            return None
        table = planned(recent, self, self.evaluations * (LONG if every and turn % (every * LONG) == 0 else 1))
        return table if pays(table, seen, self) else None


def planned(seen: Seen, policy: Policy, evaluations: int) -> Ints:
    """A table for the records of a window: operations for balance, then so much of a search by seconds.

    Operations are the few that pay, or where these leave the load out of balance, as many as settle it, from where they
    end or from EPLB's placement, whichever is worth most with the price of its moves. Those that settle it do so for
    twice the drift of the window, too. Where replicas are free, homes stay if that is enough.
    """
    from .cuts import busiest_ratio, guided, settled
    from .search import Search, searched

    pairs = np.ascontiguousarray(seen.window.sum(axis=1))
    totals = pairs.sum(axis=2)
    gain_s = seen.costs.pair_s * totals.sum(axis=1).mean() / len(seen.table) * policy.horizon
    cell_s = 0.0 if seen.costs.replicas_free else seen.costs.moved_bytes * seen.costs.intra_sum_s_per_byte
    seed = np.array([seen.record + 1], np.uint64)
    free, homes = np.zeros((len(seen.table), pairs.shape[1]), np.bool_), seen.costs.replicas_free
    owned = free.copy()
    owned[seen.home, np.arange(pairs.shape[1])] = homes
    few, _ = guided(seen.table, totals, owned, policy.slack, gain_s, cell_s, policy.quantile)
    tables = [seen.table, few]
    if policy.kicks and busiest_ratio(few, totals, policy.quantile) > policy.trigger:
        published = eplb_table(seen.window, seen.table.shape[1], "refined", seen.table)
        starts = [(few, free), (published, free), *([(few, owned)] if homes else [])]
        tables += [settled(start, drifted(totals), kept, policy.slack, policy.kicks, seed) for start, kept in starts]
    table = min(tables, key=lambda one: busiest_ratio(one, totals, policy.quantile) * gain_s + price_of(one, seen))
    if evaluations:
        origin, batches = held_by(seen.table, seen), seen.window.shape[1]
        task = Search.of(pairs, batches, origin, seen.home, seen.group, seen.costs, policy.horizon, policy.quantile)
        table, _ = searched(table, task, evaluations, seed)
    return table


def drifted(totals: Ints) -> Ints:
    """The vectors `[B, E]`, then each twice as far from their mean, `[2B, E]`: later loads lie beyond those of now."""
    if len(totals) == 1:
        return totals
    mean_E = totals.mean(axis=0)
    beyond = np.maximum(np.rint(mean_E + BEYOND * (totals - mean_E)), 0).astype(np.int64)
    return np.concatenate([totals, beyond])


def pays(table: Ints, seen: Seen, policy: Policy) -> bool:
    """Check whether a table saves more on the window, times the horizon, than its moves cost."""
    saved_s = saving(seen.window, seen.table, table, seen.costs, seen.group, quantile=policy.quantile)
    return saved_s * policy.horizon > price_of(table, seen)


def price_of(table: Ints, seen: Seen) -> float:
    """Seconds of the moves that lead to a table."""
    from .state import homes_after, moves_seconds, transfers

    before, after = held_by(seen.table, seen), held_by(table, seen)
    moved = homes_after(seen.home, after, seen.group)
    sent = transfers(before, after, seen.home, moved, seen.costs, seen.group)
    return float(moves_seconds(sent, len(table), seen.costs, seen.group))


def held_by(table: Ints, seen: Seen) -> Bools:
    """Mask of the experts on each device under a table, `[D, E]`."""
    from .state import holds

    held: Bools = holds(table, len(seen.home))
    return held
