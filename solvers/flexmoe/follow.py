"""A whole run replayed: placements that follow the load, by decisions that see the past only.

Legend: R records; L MoE layers; M micro-batches of a step; E experts; D devices in nodes of G, S slots of each.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self

import numpy as np

from ...workers import Workers, given
from ..arrays import Bools, Floats, Ints
from ..placement import DEALS
from .costs import Costs

Split = Literal["quota", "even", "capacity"]
LAG_STEPS = 3  # from a recorded step to the first under what was decided after it
PARTS = ("experts", "exchanges", "sums", "moves")


@dataclass(frozen=True, slots=True)
class Seen:
    """Facts that a decision about one layer may know."""

    record: int  #: The last one seen, from 0
    layer: int
    window: Ints  #: Pairs of the last records by micro-batch, expert and source, latest last, `[W, M, E, D]`
    table: Ints  #: The expert in every slot, -1 in an empty one, by the decision before, `[D, S]`
    home: Ints  #: Device of every expert's owner under it, `[E]`
    balance: float  #: Max/mean of the last record under the run's split and this table, mean of its micro-batches
    group: int
    costs: Costs

    @classmethod
    def of(cls, record: int, layer: int, window: Ints, table: Ints, home: Ints, *, group: int, costs: Costs) -> Self:
        """The facts after the last record of a window, under the exact split; the rest as the fields."""
        from ..step_deals import QUOTA
        from .seconds import judged
        from .state import holders_in

        balance, _ = judged(window[-1], holders_in(table, len(home), group), costs, QUOTA)
        return cls(record, layer, window, table, home, balance, group, costs)


class Decide(Protocol):
    """A rule of when and how placements change."""

    @property
    def window(self) -> int:
        """Records that it wants to see."""
        ...

    def __call__(self, seen: Seen) -> Ints | None:
        """The table from when it can be taken on; None: as it was."""
        ...


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the log."""

    record: int  #: From which on it holds
    layer: int
    kind: Literal["expand", "shrink", "migrate"]
    expert: int
    source: int  #: Device that sent it, or held it
    target: int  #: Device that holds it, -1 after a shrink


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one layer's table, and whether it paid."""

    record: int  #: From which on it holds
    layer: int
    price_s: float  #: Of its moves
    #: expected_s, saved_s: seconds per step less than without it, on the window it was decided on; in fact, on the
    #: records for which it held, as far as the horizon goes. Both are by the run's quantile
    expected_s: float
    saved_s: float
    records: int  #: Of `saved_s`


@dataclass(frozen=True, slots=True)
class Run:
    """A replayed run."""

    tables: Ints  #: Of every period, `[Q, L, D, S]`
    period: Ints  #: Of every record, `[R]`
    operations: list[Operation]
    changes: list[Change]
    sent: Ints  #: Experts sent, with their state: rows of (record, layer, expert, from, to), `[N, 5]`
    moved_bytes: float
    balance: Floats  #: Max/mean of every record and layer, `[R, L]`
    seconds: Floats  #: Per step of every record and layer, by `PARTS`, `[R, L, 4]`
    planning_s: float  #: CPU seconds of all decisions

    def violations(self, horizon: float) -> int:
        """Changes that cost more than they save in so many steps on the window that they were decided on."""
        return sum(change.expected_s * horizon < change.price_s for change in self.changes)

    @property
    def moved(self) -> int:
        """Experts sent."""
        return len(self.sent)

    @property
    def step_s(self) -> float:
        """Mean seconds per layer and step, moves included."""
        return self.over_steps("seconds")

    def over_steps(self, what: Literal["seconds", "balance"], quantile: float = 0.0) -> float:
        """Seconds per layer, moves included, or the balance: a quantile over the steps, 0: their mean."""
        from .seconds import over_steps

        figures_RL = self.seconds.sum(axis=2) if what == "seconds" else self.balance
        return float(over_steps(figures_RL.mean(axis=1), quantile))


def follow(
    records: Ints,
    start: Ints,
    decide: Decide,
    costs: Costs,
    *,
    group: int,
    steps: int = 1,
    split: Split = "quota",
    horizon: float = 100.0,
    quantile: float = 0.0,
    workers: Workers | None = None,
) -> Run:
    """Replay records under placements that a rule changes between them.

    As in the runtime, a rule decides while the step after a record runs, and experts travel while one more does. Its
    table holds from the first record that is at least three steps later.

    Parameters
    ----------
    records
        Token-expert pairs by record, layer, micro-batch, expert and source, `[R, L, M, E, D]`.
    start
        The tables that the run starts with, `[L, D, S]`.
    group
        G, devices of a node.
    steps
        That a record stands for; what moves is charged once.
    split
        Rule by which an expert's tokens choose among its replicas.
    horizon
        Steps over which `Change.saved_s` is told.
    quantile
        Of records' seconds, by which it is told what a change saves; 0: their mean.
    workers
        Workers that replay the layers; None: threads. The run is the same whichever do, but for its `planning_s`.
    """
    rule = DEALS.index(split)
    layers = (
        _Layer(layer, np.ascontiguousarray(records[:, layer]), costs, group, steps, rule, horizon, quantile)
        for layer in range(records.shape[1])
    )
    with given(workers) as there:
        runs = [*there.map(_replayed, ((layer, start[layer.layer], decide) for layer in layers))]
    starts = sorted({0, *(record for run in runs for record in run.tables)})
    tables = np.array([[run.table_at(record) for run in runs] for record in starts])
    return Run(
        tables=tables,
        period=np.searchsorted(starts, np.arange(len(records)), side="right") - 1,
        operations=sorted((one for run in runs for one in run.operations), key=lambda one: one.record),
        changes=[one for run in runs for one in run.changes],
        sent=np.concatenate(sent := [one for run in runs for one in run.sent] or [np.zeros((0, 5), np.int64)]),
        moved_bytes=costs.moved_bytes * sum(map(len, sent)),
        balance=np.stack([run.balance for run in runs], axis=1),
        seconds=np.stack([run.seconds for run in runs], axis=1),
        planning_s=sum(run.planning_s for run in runs),
    )


@dataclass(slots=True)
class _Layer:
    """The run of one layer."""

    layer: int
    records: Ints  #: `[R, M, E, D]`
    costs: Costs
    group: int
    steps: int
    rule: int
    horizon: float
    quantile: float
    tables: dict[int, Ints] = field(default_factory=dict)  #: By the record from which on they hold
    operations: list[Operation] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    sent: list[Ints] = field(default_factory=list)
    planning_s: float = 0.0
    balance: Floats = field(default_factory=lambda: np.empty(0))
    seconds: Floats = field(default_factory=lambda: np.empty(0))

    def replay(self, start: Ints, decide: Decide) -> None:
        """Judge every record, and let the rule change the table after it."""
        from .seconds import judged
        from .state import holders_in

        num_experts, lag = self.records.shape[2], -(-LAG_STEPS // self.steps)
        self.balance, self.seconds = np.zeros(len(self.records)), np.zeros((len(self.records), len(PARTS)))
        table, home = np.ascontiguousarray(start, np.int64), first_homes(start, num_experts)
        self.tables[0] = table
        latest = holders_in(table, num_experts, self.group)
        coming = deque([latest] * lag)  # holders at this record and the next lag - 1
        for r, batches in enumerate(self.records):
            held = coming.popleft()
            self.balance[r], self.seconds[r, :3] = judged(batches, held, self.costs, self.rule)
            if r + lag >= len(self.records):
                continue  # no later record
            started = time.thread_time()
            window = self.records[max(0, r + 1 - decide.window) : r + 1]
            balance = float(self.balance[r])
            if held is not latest:
                balance, _ = judged(batches, latest, self.costs, self.rule)
            seen = Seen(r, self.layer, window, table, home, balance, self.group, self.costs)
            new = decide(seen) if window.any() else None
            self.planning_s += time.thread_time() - started
            if new is not None and not np.array_equal(new, table):
                home = self._change(r + lag, table, new, home, window)
                table, latest = new, holders_in(new, num_experts, self.group)
            coming.append(latest)
        self._look_back()

    def table_at(self, record: int) -> Ints:
        """The table that holds at a record."""
        return self.tables[max(start for start in self.tables if start <= record)]

    def _change(self, record: int, old: Ints, new: Ints, home: Ints, window: Ints) -> Ints:
        """Note a change from a record on; the homes after it."""
        from .state import holds, homes_after, moves_seconds, transfers

        num_experts = len(home)
        before, after = holds(old, num_experts), holds(new, num_experts)
        assert after.any(axis=0).all()
        moved = homes_after(home, after, self.group)
        sent = transfers(before, after, home, moved, self.costs, self.group)
        price_s = moves_seconds(sent, len(new), self.costs, self.group)
        self.tables[record] = new
        self.sent.append(np.insert(sent, [0], [record, self.layer], axis=1))
        self.seconds[record, 3] += price_s / self.steps
        self.operations += operations(before, after, record, self.layer, self.group)
        self.changes.append(Change(record, self.layer, price_s, self._saved(window, old, new), 0.0, 0))
        return moved

    def _saved(self, records: Ints, old: Ints, new: Ints) -> float:
        return saving(records, old, new, self.costs, self.group, self.rule, quantile=self.quantile)

    def _look_back(self) -> None:
        """Tell of every change what it saved while it held."""
        starts = [change.record for change in self.changes]
        for i, (change, end) in enumerate(zip(self.changes, [*starts[1:], len(self.records)], strict=False)):
            held = range(change.record, min(end, change.record + max(1, int(self.horizon / self.steps))))
            old, new = self.table_at(change.record - 1), self.tables[change.record]
            saved_s = self._saved(self.records[held.start : held.stop], old, new)
            self.changes[i] = replace(change, saved_s=saved_s, records=len(held))


def _replayed(layer: _Layer, start: Ints, decide: Decide) -> _Layer:
    """The run of a layer, without the records that it was of."""
    layer.replay(start, decide)
    return replace(layer, records=layer.records[:0])


def step_seconds(batches: Ints, table: Ints, costs: Costs, group: int, rule: int = 0) -> float:
    """Predicted seconds of one step of a layer, (1) of `Costs`, without moves."""
    from .seconds import judged
    from .state import holders_in

    _, seconds = judged(batches, holders_in(table, batches.shape[1], group), costs, rule)
    return float(seconds.sum())


def saving(
    records: Ints, old: Ints, new: Ints, costs: Costs, group: int, rule: int = 0, *, quantile: float = 0.0
) -> float:
    """Seconds per step that records `[W, M, E, D]` take less under a new table: of their quantile, 0: of their mean."""
    from .seconds import over_steps

    before, after = (
        np.array([step_seconds(batches, table, costs, group, rule) for batches in records]) for table in (old, new)
    )
    return float(over_steps(before, quantile) - over_steps(after, quantile))


def first_homes(table: Ints, num_experts: int) -> Ints:
    """The home of every expert `[E]` at the start: of its devices, taken in turn, the one with fewest homes so far."""
    owned, home = np.zeros(len(table), np.int64), np.empty(num_experts, np.int64)
    for e in range(num_experts):
        at = np.flatnonzero((table == e).any(axis=1))
        home[e] = at[owned[at].argmin()]
        owned[home[e]] += 1
    return home


def operations(before: Bools, after: Bools, record: int, layer: int, group: int) -> Iterator[Operation]:
    """Operations from holders `[D, E]` to others: an expert leaves and arrives (migrate), arrives or leaves only."""
    for e in np.flatnonzero((before != after).any(axis=0)):
        lost, gained = np.flatnonzero(before[:, e] & ~after[:, e]), np.flatnonzero(after[:, e] & ~before[:, e])
        held = np.flatnonzero(before[:, e])
        for source, target in zip(lost, gained, strict=False):
            yield Operation(record, layer, "migrate", int(e), int(source), int(target))
        for target in gained[len(lost) :]:
            near = held[held // group == target // group]
            yield Operation(record, layer, "expand", int(e), int((near if len(near) else held)[0]), int(target))
        for source in lost[len(gained) :]:
            yield Operation(record, layer, "shrink", int(e), int(source), -1)
