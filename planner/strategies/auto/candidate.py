"""Candidates of auto: components decided one on top of the other, ranked by what they gain over today.

Those whose samples stay are ranked by the lower end of the gain's interval, and so are those whose samples move.
Between the two the gain itself decides: samples that move are resampled by whole steps, others by steps drawn from
blocks where steps are few, and lower ends from different resampling schemes cannot be compared.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from ....runtime.decisions import DispatchModel
from ....runtime.exports import engines_of
from ....runtime.plan import Metric, Plan
from ...evaluate.evaluate import MATTERS
from ...params import Params
from ..strategy import Strategy
from .options import Tried

if TYPE_CHECKING:
    from ...solve import Decided

MIN_SEARCH_S = 0.05  # of a strategy that searches as long as it may, where no time is left


def searches(chosen: Strategy) -> bool:
    """Check whether a strategy searches as long as it may."""
    return chosen.usual.within(MIN_SEARCH_S) != chosen.usual


@dataclass(frozen=True, slots=True)
class Component:
    """A strategy under a dispatch model, with its parameters."""

    strategy: Strategy
    dispatch_model: DispatchModel
    params: Params

    @property
    def name(self) -> str:
        """Name on a screen."""
        title = self.strategy.titled(self.params)
        return f"{title}, {self.dispatch_model}" if len(self.strategy.dispatch_models) > 1 else title

    @property
    def searches(self) -> bool:
        """Check whether its strategy searches as long as it may."""
        return searches(self.strategy)

    @property
    def without_replicas(self) -> "Component":
        """Component with parameters that name no number of replicas: candidates with different ones are of one kind."""
        return replace(self, params=self.params.without_replicas)


Components = tuple[Component, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Components decided one on top of the other, and their gain over today on the inner split."""

    components: Components
    solved: "Decided"
    gain_over_today: Metric  #: The gain, of what today has
    wall_s: float  #: Seconds to decide and to compare it, but for searches that last as long as they may

    @property
    def has_interval(self) -> bool:
        """Check whether the gain has an interval, as that of samples in a single step has not."""
        return self.gain_over_today.low is not None

    @property
    def lower(self) -> float:
        """Lower end of the gain; the gain itself where it has no interval."""
        return self.gain_over_today.value if self.gain_over_today.low is None else self.gain_over_today.low

    @property
    def gain(self) -> float:
        """The gain itself."""
        return self.gain_over_today.value

    @property
    def moves(self) -> bool:
        """Check whether its samples move, so that it has another kind of interval."""
        return self.solved.task.moves_samples

    @property
    def effort(self) -> tuple[float, ...]:
        """Effort to carry it out, for sorting: components, then slots."""
        placement = self.solved.plan.placement
        return (len(self.components), 0 if placement is None else placement.num_slots, -self.lower)


def named(components: Components) -> str:
    """Name of several components on a screen."""
    return " + ".join(component.name for component in components)


Row = TypeVar("Row", Candidate, Tried)
LOWER, GAIN = attrgetter("lower"), attrgetter("gain")


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates, the chosen one first, the rest by gain.

    The best with and without moving samples are compared by gain alone, as their intervals differ in kind.
    """
    rows = sorted(candidates, key=lambda row: (not row.has_interval, -row.lower, named(row.components)))
    alike = [kind for moves in (False, True) if (kind := [row for row in rows if row.moves == moves])]
    best = least_effort([least_effort(kind, LOWER) for kind in alike], GAIN)
    merged = heapq.merge(*alike, key=lambda row: (not row.has_interval, -row.gain))  # by the first left of each
    return [best, *(row for row in merged if row is not best)]


def best_of_each(rows: Sequence[Candidate], kind: Callable[[Component], Hashable]) -> list[Candidate]:
    """The best of the ranked candidates whose components are of the same kinds; the first is the best of its own."""
    alike = dict[tuple[Hashable, ...], list[Candidate]]()
    for row in rows:
        alike.setdefault(tuple(map(kind, row.components)), []).append(row)
    return [rows[0], *(least_effort(group, LOWER) for group in alike.values() if rows[0] not in group)]


def least_effort(rows: Sequence[Candidate], by: Callable[[Candidate], float]) -> Candidate:
    """The candidate of least effort of those within 1 % of the best by some figure."""
    return min(within_1_percent(rows, by), key=lambda row: row.effort)


def within_1_percent(rows: Sequence[Row], by: Callable[[Row], float]) -> list[Row]:
    """The rows within 1 % of the best by some figure; a gain that has an interval is better than any without."""
    best = max(rows, key=lambda row: (row.has_interval, by(row)))
    return [row for row in rows if row.has_interval == best.has_interval and by(best) - by(row) < MATTERS]


def record(
    candidate: Candidate, plan: Plan, share: Metric, metrics: dict[str, float], today: dict[str, float]
) -> Tried:
    """The record of a candidate with a plan of its components, and the plan's figures beside today's."""
    return Tried(
        parts=tuple(component.name for component in candidate.components),
        decisions=plan.decisions.names,
        dispatch_model=plan.dispatch_model,
        engines=engines_of(plan),
        inner=candidate.lower,
        gain=candidate.gain,
        has_interval=candidate.has_interval,
        listed=False,
        share=share,
        metrics=metrics,
        today=today,
    )
