"""The search of auto: components alone, the best with others added, each in turn replaced until nothing gains.

A component is a strategy under a dispatch model, which the screen calls a part; a candidate is one or several of them.
Candidates are decided by one part of the fitted units and compared on the rest of these, all in one currency: percent
of what today's step takes there; without seconds of a step, of today's experts; without these, of today's load on the
busiest device.

Those whose samples stay are ranked by the lower end of the gain's interval, and so are those whose samples move.
Between the two the gain itself decides: samples that move are resampled by whole steps, others by steps drawn from
blocks where steps are few, and lower ends from different resampling schemes cannot be compared.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from ....errors import InputError, MoeplanError, UsageError
from ....runtime.decisions import TRAINED, WIRED, DispatchModel
from ....runtime.exports import ENGINES, engines_of
from ....runtime.plan import Metric, Plan
from ....solvers.outcome import Status
from ...evaluate.evaluate import MATTERS, Evaluated, evaluate
from ...evaluate.journey import Contender, journey_of, today
from ...evaluate.metrics import BALANCE, EXPERTS, METRICS, Figures
from ...evaluate.price import STEP
from ...figures import percent
from ...options import AutoOptions, Currency, Ended, Tried
from ...params import Params
from ...task import Task
from ..registry import STRATEGIES, strategy
from ..strategy import Strategy
from . import AutoParams

if TYPE_CHECKING:
    from ...solve import Decided

BEAM = 3  # candidates that others are added to
CURRENCIES: tuple[Currency, ...] = (STEP, EXPERTS, BALANCE)  # the best there is
TRIAL_S = 1.0  # of a strategy that searches as long as it may, in a candidate and after Ctrl-C
SEARCH_SHARE = 0.25  # of the time limit, at most, for such a search
MIN_SEARCH_S = 0.05  # for one where no time is left
# Times as long as a candidate took: to decide it by all fitted units, and to judge it beside its rivals.
LAST_SOLVE_FACTOR = 4.0


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


Row = TypeVar("Row", Candidate, Tried)
LOWER, GAIN = attrgetter("lower"), attrgetter("gain")


@dataclass(eq=False)
class Search:
    """The candidates of a task."""

    task: Task
    params: AutoParams
    started: float  #: `time.perf_counter()` when the time limit began
    tried: dict[Components, Candidate] = field(default_factory=dict)
    refused: dict[Components, str] = field(default_factory=dict)  #: Why components could not be tried
    status: Ended = Status.FEASIBLE
    #: Components that could not gain on top of some others
    cannot_gain_yet: dict[Component, None] = field(default_factory=dict)
    #: By label and scenes
    figures_of_today: dict[tuple[Hashable, ...], Figures] = field(default_factory=dict)

    def run(self) -> None:
        """Try every component alone, the best ones with others added, then other components in place of each.

        UsageError where no strategy can plan for the task; errors of its trace and its profile.
        """
        self.task.say(f"comparing by {METRICS[self.metric].noun}")
        try:
            for component in self.components():
                self.attempt((component,))
            while self.tried and self.improved_by((*self.grown(), *self.replaced())):
                pass
        except KeyboardInterrupt:
            if not self.tried:
                raise
            self.status = Status.INTERRUPTED
        if not self.tried:
            engine = ENGINES.get(self.params.engine or "")
            names = dict[str, dict[str, None]]()
            for (component, *_), reason in self.refused.items():
                if engine is None or component.strategy.decides in engine.carries:
                    names.setdefault(reason, {})[replace(component, params=component.strategy.usual).name] = None
            reasons = "; ".join(f"{', '.join(several)}: {reason}" for reason, several in names.items())
            reasons = reasons or "none is for this dispatch model"
            if engine is None:
                raise UsageError(f"no strategy can plan by this: {reasons}")
            carried = " and ".join(sorted(engine.carries))
            raise UsageError(
                f"--engine {engine.name} carries out a {carried} alone, and no strategy can plan one by this:"
                f" {reasons}; give another --engine, or --for"
            )

    @cached_property
    def metric(self) -> Currency:
        """The currency: seconds of a step where those of today's are known, else of its experts, else their load."""
        task = replace(self.task, request=replace(self.task.request, size=self.task.size), inner=True)
        usual = today(task.model, task.request.cluster)
        evaluated = self.evaluated(task, usual)
        known = evaluated.judged[usual.label].value
        return next((one for one in CURRENCIES if one in known), BALANCE)

    def components(self) -> Iterator[Component]:
        """Components that the use, the engine and the dispatch model asked for allow.

        Those that shift load come first, and those that search long last.
        """
        asked, use, engine = self.task.request.dispatch_model, self.task.use, self.params.engine
        asked = asked if self.task.wire is None else WIRED
        for chosen in sorted(map(strategy, STRATEGIES), key=lambda one: (searches(one), not one.shifts_load)):
            if not engine and (reason := chosen.apart(self.task)):
                self.refused[(Component(chosen, chosen.dispatch_models[0], chosen.usual),)] = reason
            for model, params in itertools.product(chosen.dispatch_models, chosen.variants(self.task)):
                component = Component(chosen, model, params)
                if use and (use not in chosen.uses or (use == "training" and model not in TRAINED)):
                    self.refused[(component,)] = f"not for {use}"
                elif engine and (chosen.decides not in ENGINES[engine].carries or model != "standard"):
                    self.refused[(component,)] = f"{engine} does not carry it out"
                elif self.metric != STEP and not chosen.shifts_load:
                    self.refused[(component,)] = "it changes no device's load, and nothing times whole steps"
                elif asked in (None, model):
                    yield component

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.started

    def left_s(self, component: Component) -> float:
        """Seconds left after trying a component (as slow as the slowest so far) and the final solve."""
        if (limit_s := self.params.time_limit_s) is None:
            return math.inf
        longest_s = max(one.wall_s for one in self.tried.values())
        trial_s = longest_s + (self.search_s if searches(component.strategy) else 0.0)
        long = any(searches(one.strategy) for one in (*self.ranked()[0].components, component))
        last_s = SEARCH_SHARE * limit_s if long else 0.0
        return limit_s - self.elapsed_s - trial_s - LAST_SOLVE_FACTOR * longest_s - last_s

    @property
    def search_s(self) -> float:
        """Seconds of a search that lasts as long as it may, in a candidate."""
        return min(SEARCH_SHARE * (self.params.time_limit_s or math.inf), TRIAL_S)

    @property
    def last_search_s(self) -> float:
        """Seconds of such a search in the last solve."""
        if self.status is Status.INTERRUPTED:
            return TRIAL_S
        limit_s = self.params.time_limit_s or math.inf
        return max(min(SEARCH_SHARE * limit_s, limit_s - self.elapsed_s), MIN_SEARCH_S)

    def ranked(self) -> list[Candidate]:
        """Candidates, the chosen one first, the rest by gain.

        The best with and without moving samples are compared by gain alone, as their intervals differ in kind.
        """
        rows = sorted(self.tried.values(), key=lambda one: (not one.has_interval, -one.lower, named(one.components)))
        alike = [kind for moves in (False, True) if (kind := [one for one in rows if one.moves == moves])]
        best = least_effort([least_effort(kind, LOWER) for kind in alike], GAIN)
        merged = heapq.merge(*alike, key=lambda one: (not one.has_interval, -one.gain))  # by the first left of each
        return [best, *(one for one in merged if one is not best)]

    def improved_by(self, others: Sequence[Components]) -> bool:
        """Attempt some; check whether one of them is better than all before."""
        before = self.ranked()[0]
        for components in others:
            self.attempt(components)
        return self.ranked()[0] is not before

    def grown(self) -> Iterator[Components]:
        """The best candidates of different kinds with one component more, which may gain there alone."""
        every = self.kinds()
        alone = [*(one.components[0] for one in every if len(one.components) == 1), *self.cannot_gain_yet]
        for candidate, component in itertools.product(every[:BEAM], alone):
            for at in reversed(range(len(candidate.components) + 1)):
                yield (*candidate.components[:at], component, *candidate.components[at:])

    def replaced(self) -> Iterator[Components]:
        """Variants of the best candidate with one component exchanged."""
        components, best = self.ranked()[0].components, {one.components for one in self.kinds()}
        others = [one.components[0] for one in self.ranked() if len(one.components) == 1 and one.gain >= MATTERS]
        for (at, own), other in itertools.product(enumerate(components), others):
            alike = (other,) in best or other.without_replicas == own.without_replicas
            if len(components) > 1 and other.strategy.decides == own.strategy.decides and alike:
                yield (*components[:at], other, *components[at + 1 :])

    def kinds(self) -> list[Candidate]:
        """The candidates, of several that differ in memory alone the best."""
        return best_of_each(self.ranked(), attrgetter("without_replicas"))

    def attempt(self, components: Components) -> None:
        """Decide the last component on top of the others and compare it with today; refuse what cannot be decided."""
        *before, component = components
        if components in self.tried or components in self.refused:
            return
        if before:
            self.attempt(tuple(before))
        base = self.tried.get(tuple(before))
        if before and (base is None or not component.strategy.stands_on(base.solved.plan)):
            return
        if self.tried and self.left_s(component) <= 0:
            self.status = Status.TIME_LIMIT
            return
        self.task.say(f"trying {named(components)}")
        try:
            candidate = self.solve_component(component, base)
        except MoeplanError as error:
            self.refused[components] = str(error)
            return
        if (engine := self.params.engine) and engine not in engines_of(candidate.solved.plan):
            self.refused[components] = f"{engine} does not carry it out"
        else:
            self.tried[components] = candidate
        if any(one.status is Status.INTERRUPTED for one in candidate.solved.plan.outcome.values()):
            raise KeyboardInterrupt  # a search that kept its best

    def solve_component(self, component: Component, base: Candidate | None) -> Candidate:
        """A component decided on top of a candidate, beside today.

        InputError where it has no figure in the currency, UsageError where it cannot gain what matters.
        """
        from ...solve import decide

        began = time.perf_counter()
        task = self.task_of(component, base.solved if base else None, inner=True, search_s=self.search_s)
        if self.tried and (most := self.most_saved(task)) < MATTERS:
            self.cannot_gain_yet[component] = None
            raise UsageError(
                f"it saves {percent(most, 1)} of the {METRICS[self.metric].noun} at most, whatever it decides"
            )
        decided = decide(task)
        share, _, _ = self.gain_over_today(decided)
        searched_s = decided.solution.outcome.wall_s if searches(component.strategy) else 0.0
        wall_s = time.perf_counter() - began - searched_s + (base.wall_s if base else 0.0)
        return Candidate((*(base.components if base else ()), component), decided, share, wall_s)

    def most_saved(self, task: Task) -> float:
        """Share that a task's strategy saves at most of what there is without it; infinite where not known."""
        before = today(task.model, task.request.cluster).wired(task.wire).journey
        if task.base is not None:
            before = journey_of(task.base, lambda file: task.base_files[file.file])
        if (bound := task.strategy.bound(before)) is None:
            return math.inf
        rows = [Contender("plan", bound), Contender("without", before)]
        least, usual = evaluate(task.judging_scenes, rows, replay=task.replay).judged.values()
        known = self.metric in least.value and self.metric in usual.value
        share = least.share(self.metric, usual) if known else None
        return math.inf if share is None else share.value

    def gain_over_today(self, decided: "Decided") -> tuple[Metric, dict[str, float], dict[str, float]]:
        """The gain over today on the part that judges, and the figures of both; errors as in `solve_component`."""
        from ...solve import plan_and_today

        task = decided.task
        own, other = plan_and_today(task, decided.plan, decided.sidecars)
        evaluated = self.evaluated(task, other, own)
        ours, usual = evaluated.judged[own.label], self.figures_of_today[_seen(task, other)]
        if self.metric not in ours.value or self.metric not in usual.value:
            missing = evaluated.seconds.missing if evaluated.seconds else {}
            raise InputError(
                f"its {METRICS[self.metric].noun} is not known: no seconds of {', '.join(missing) or 'this dispatch'}"
            )
        share = ours.share(self.metric, usual) or Metric(value=0.0, low=None, high=None)
        return share, ours.value, usual.value

    def evaluated(self, task: Task, usual: Contender, *others: Contender) -> Evaluated:
        """Contenders on the part that judges, with what runs today where its figures are not known there."""
        key = _seen(task, usual)
        rows = others if key in self.figures_of_today else (*others, usual)
        evaluated = evaluate(task.judging_scenes, rows, replay=task.replay)
        if key not in self.figures_of_today:
            self.figures_of_today[key] = evaluated.judged[usual.label]
        return evaluated

    def task_of(self, component: Component, base: "Decided | None", *, inner: bool, search_s: float = math.inf) -> Task:
        """The task of a component on top of what was decided, in the same steps as all others."""
        request = replace(
            self.task.request,
            size=self.task.size,
            strategy=component.strategy.name,
            params=component.params.within(search_s, patient=self.params.time_limit_s is None),
            dispatch_model=component.dispatch_model,
        )
        task = replace(
            self.task,
            request=request,
            strategy=component.strategy,
            base=base.plan if base else None,
            base_files=base.sidecars if base else {},
            dispatch_model=component.dispatch_model,
            inner=inner,
        )
        component.strategy.check(task)
        return task

    def options(self, chosen: Tried) -> AutoOptions:
        """The record of the search, beside the chosen candidate as solved anew: the others on what is held out.

        At the time limit, and at Ctrl-C, those that were judged until then.
        """
        best, *others = self.ranked()
        records, limit_s = {best: chosen}, self.params.time_limit_s or math.inf
        try:
            for candidate in others:
                if self.elapsed_s + candidate.wall_s > limit_s:
                    self.status = Status.TIME_LIMIT if self.status is Status.FEASIBLE else self.status
                    break
                records[candidate] = self.record_held_out(candidate)
        except KeyboardInterrupt:
            self.status = Status.INTERRUPTED
        listed = best_of_each([*records], lambda one: (one.without_replicas, one == one.without_replicas))
        rows = [held.model_copy(update={"listed": one in listed}) for one, held in records.items()]
        refused = {named(components): reason for components, reason in self.refused.items()}
        return AutoOptions(
            engine=self.params.engine, metric=self.metric, tried=tuple(rows), refused=refused, status=self.status
        )

    def record_held_out(self, candidate: Candidate) -> Tried:
        """A candidate, as decided on the inner split, on what is held out."""
        base = self.tried.get(candidate.components[:-1])
        task = self.task_of(candidate.components[-1], base.solved if base else None, inner=False)
        share, ours, usual = self.gain_over_today(replace(candidate.solved, task=task))
        return record(candidate, candidate.solved.plan, share, ours, usual)


def best_of_each(rows: Sequence[Candidate], kind: Callable[[Component], Hashable]) -> list[Candidate]:
    """The best of the ranked candidates whose components are of the same kinds; the first is the best of its own."""
    alike = dict[tuple[Hashable, ...], list[Candidate]]()
    for one in rows:
        alike.setdefault(tuple(map(kind, one.components)), []).append(one)
    return [rows[0], *(least_effort(group, LOWER) for group in alike.values() if rows[0] not in group)]


def least_effort(rows: Sequence[Candidate], by: Callable[[Candidate], float]) -> Candidate:
    """The candidate of least effort of those within 1 % of the best by some figure."""
    return min(within_1_percent(rows, by), key=lambda one: one.effort)


def within_1_percent(rows: Sequence[Row], by: Callable[[Row], float]) -> list[Row]:
    """The rows within 1 % of the best by some figure; a gain that has an interval is better than any without."""
    best = max(rows, key=lambda one: (one.has_interval, by(one)))
    return [one for one in rows if one.has_interval == best.has_interval and by(best) - by(one) < MATTERS]


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


def _seen(task: Task, usual: Contender) -> tuple[Hashable, ...]:
    """Key of everything that the figures of today's contender depend on."""
    return (usual.label, *(scene for _, scene in task.judging_scenes))


def searches(chosen: Strategy) -> bool:
    """Check whether a strategy searches as long as it may."""
    return chosen.usual.within(MIN_SEARCH_S) != chosen.usual


def named(components: Components) -> str:
    """Name of several components on a screen."""
    return " + ".join(component.name for component in components)
