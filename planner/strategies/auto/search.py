"""The search of auto: components alone, the best with others added, each in turn replaced until nothing gains.

A component is a strategy under a dispatch model, which the screen calls a part; a candidate is one or several of them.
Candidates are decided by one part of the fitted units and compared on the rest of these, all in one currency: percent
of what today's step takes there; without seconds of a step, of today's experts; without these, of today's load on the
busiest device.
"""

import itertools
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING
from uuid import uuid4

from ....errors import InputError, MoeplanError, RankError, UsageError
from ....runtime.decisions import TRAINED, WIRED
from ....runtime.exports import ENGINES, Engine, engines_of
from ....runtime.plan import Metric
from ....solvers.outcome import Status
from ....workers import Pending
from ...evaluate.evaluate import MATTERS, Evaluated, evaluate
from ...evaluate.journey import Contender, journey_of, today
from ...evaluate.metrics import BALANCE, EXPERTS, METRICS, Currency, Figures
from ...evaluate.price import STEP
from ...figures import percent
from ...task import Task
from ..registry import STRATEGIES, strategy
from . import AutoParams, ahead
from .candidate import MIN_SEARCH_S, Candidate, Component, Components, best_of_each, named, ranked, record, searches
from .options import AutoOptions, Ended, Tried

if TYPE_CHECKING:
    from ...solve import Decided

BEAM = 3  # candidates that others are added to
CURRENCIES: tuple[Currency, ...] = (STEP, EXPERTS, BALANCE)  # the best there is
TRIAL_S = 1.0  # of a strategy that searches as long as it may, in a candidate and after Ctrl-C
SEARCH_SHARE = 0.25  # of the time limit, at most, for such a search
# Times as long as a candidate took: to decide it by all fitted units, and to judge it beside its rivals.
LAST_SOLVE_FACTOR = 4.0


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
    key: str = field(default_factory=lambda: uuid4().hex)  #: By which workers know what they have read of it

    def run(self) -> None:
        """Try every component alone, the best ones with others added, then other components in place of each.

        UsageError where no strategy can plan for the task; errors of its trace and its profile.
        """
        self.task.say(f"comparing by {METRICS[self.metric].noun}")
        try:
            self.attempt_all([(component,) for component in self.components()])
            while self.tried and self.improved_by((*self.grown(), *self.replaced())):
                pass
        except KeyboardInterrupt:
            if not self.tried:
                raise
            self.status = Status.INTERRUPTED
        if self.status is not Status.FEASIBLE:  # workers may be at candidates still
            self.task = replace(self.task, workers=None)
        if not self.tried:
            raise self.refusal

    @property
    def refusal(self) -> UsageError:
        """The error where nothing can be tried: every reason, and the strategies that it keeps out."""
        names, engine = dict[str, dict[str, None]](), self.engine
        for (component, *_), reason in self.refused.items():
            if engine is None or component.strategy.decides in engine.carries:
                names.setdefault(reason, {})[replace(component, params=component.strategy.usual).name] = None
        reasons = "; ".join(f"{', '.join(several)}: {reason}" for reason, several in names.items())
        reasons = reasons or "none is for this dispatch model"
        if engine is None:
            return UsageError(f"no strategy can plan by this: {reasons}")
        carried = " and ".join(sorted(engine.carries))
        return UsageError(
            f"--engine {engine.name} carries out a {carried} alone, and no strategy can plan one by this: {reasons};"
            " give another --engine, or --for"
        )

    @property
    def engine(self) -> Engine | None:
        """The engine that must carry the plan out; None: moeplan.runtime."""
        return ENGINES.get(self.params.engine or "")

    @cached_property
    def metric(self) -> Currency:
        """The currency: seconds of a step where those of today's are known, else of its experts, else their load."""
        task = replace(self.task, request=replace(self.task.request, size=self.task.size), inner=True)
        usual = today(task.model, task.request.cluster)
        evaluated = self.evaluated(task, usual)
        known = evaluated.judged[usual.label].value
        return next((currency for currency in CURRENCIES if currency in known), BALANCE)

    def components(self) -> Iterator[Component]:
        """Components that the use, the engine and the dispatch model asked for allow.

        Strategies that shift load come first, and those that search long last.
        """
        asked, use, engine = self.task.request.dispatch_model, self.task.use, self.engine
        asked = asked if self.task.wire is None else WIRED
        for chosen in sorted(map(strategy, STRATEGIES), key=lambda row: (searches(row), not row.shifts_load)):
            if not engine and (reason := chosen.why_auto_skips(self.task)):
                self.refused[(Component(chosen, chosen.dispatch_models[0], chosen.usual),)] = reason
            for model, params in itertools.product(
                chosen.dispatch_models, chosen.variants(self.task, self.params.engine)
            ):
                component = Component(chosen, model, params)
                if use and (use not in chosen.uses or (use == "training" and model not in TRAINED)):
                    self.refused[(component,)] = f"not for {use}"
                elif engine and (chosen.decides not in engine.carries or model != "standard"):
                    self.refused[(component,)] = f"{engine.name} does not carry it out"
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
        longest_s = max(candidate.wall_s for candidate in self.tried.values())
        trial_s = longest_s + (self.search_s if component.searches else 0.0)
        long = any(each.searches for each in (*self.ranked()[0].components, component))
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
        """The candidates so far, the chosen one first (`candidate.ranked`)."""
        return ranked(self.tried.values())

    def improved_by(self, others: Sequence[Components]) -> bool:
        """Attempt some; check whether one of them is better than all before."""
        before = self.ranked()[0]
        self.attempt_all(others)
        return self.ranked()[0] is not before

    def attempt_all(self, several: Sequence[Components]) -> None:
        """Attempt some in their order. Workers decide ahead those that stand on what is known."""
        pending = dict[Components, Pending[Candidate]]()
        try:
            for place, components in enumerate(several):
                if not pending:
                    pending = ahead.submit(self, several[place:])
                self.attempt(components, pending.get(components))
        finally:
            ahead.cancel(pending)

    def unread(self, task: Task) -> "Search":
        """The search of a task as workers are sent it, without what this one knows but for the currency."""
        unread = Search(task, self.params, self.started, key=self.key)
        unread.metric = self.metric
        return unread

    def grown(self) -> Iterator[Components]:
        """The best candidates of different kinds with one component more, which may gain there alone."""
        kinds = self.kinds()
        alone = [*(kind.components[0] for kind in kinds if len(kind.components) == 1), *self.cannot_gain_yet]
        for candidate, component in itertools.product(kinds[:BEAM], alone):
            for at in reversed(range(len(candidate.components) + 1)):
                yield (*candidate.components[:at], component, *candidate.components[at:])

    def replaced(self) -> Iterator[Components]:
        """Variants of the best candidate with one component exchanged."""
        candidates, kinds = self.ranked(), {kind.components for kind in self.kinds()}
        components = candidates[0].components
        others = [row.components[0] for row in candidates if len(row.components) == 1 and row.gain >= MATTERS]
        for (at, old), other in itertools.product(enumerate(components), others):
            alike = (other,) in kinds or other.without_replicas == old.without_replicas
            if len(components) > 1 and other.strategy.decides == old.strategy.decides and alike:
                yield (*components[:at], other, *components[at + 1 :])

    def kinds(self) -> list[Candidate]:
        """The candidates, of several that differ in memory alone the best."""
        return best_of_each(self.ranked(), attrgetter("without_replicas"))

    def attempt(self, components: Components, pending: Pending[Candidate] | None = None) -> None:
        """Decide the last component on top of the others and compare it with today; refuse what cannot be decided.

        What workers began ahead, `pending`, is taken from them.
        """
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
            candidate = (
                ahead.result_of(self, pending, component, base)
                if pending
                else self.solve_component(component, base, is_first=not self.tried)
            )
        except RankError:  # of workers, not of the candidate
            raise
        except MoeplanError as error:
            if isinstance(error, CannotGainError):
                self.cannot_gain_yet[component] = None
            self.refused[components] = str(error)
            return
        if self.engine and self.engine.name not in engines_of(candidate.solved.plan):
            self.refused[components] = f"{self.engine.name} does not carry it out"
        else:
            self.tried[components] = candidate
        if any(outcome.status is Status.INTERRUPTED for outcome in candidate.solved.plan.outcome.values()):
            raise KeyboardInterrupt  # a search that kept its best

    def solve_component(self, component: Component, base: Candidate | None, *, is_first: bool) -> Candidate:
        """A component decided on top of a candidate, beside today.

        InputError where it has no figure in the currency, CannotGainError unless it may gain what matters or is the
        first.
        """
        from ...solve import decide

        began = time.perf_counter()
        task = self.task_of(component, base.solved if base else None, inner=True, search_s=self.search_s)
        if not is_first and (most := self.most_saved(task)) < MATTERS:
            raise CannotGainError(
                f"it saves {percent(max(most, 0.0), 1)} of the {METRICS[self.metric].noun} at most, whatever it decides"
            )
        decided = decide(task)
        share, _, _ = self.gain_over_today(decided)
        searched_s = decided.solution.outcome.wall_s if component.searches else 0.0
        wall_s = time.perf_counter() - began - searched_s + (base.wall_s if base else 0.0)
        return Candidate((*(base.components if base else ()), component), decided, share, wall_s)

    def most_saved(self, task: Task) -> float:
        """Share that a task's strategy saves at most of what there is without it; infinite where not known."""
        before = today(task.model, task.request.cluster).wired(task.wire)
        if task.base is not None:
            journey = journey_of(task.base, lambda file: task.base_files[file.file])
            before = Contender("without", journey).served(task.engine_rule)
        if (bound := task.strategy.bound(before.journey)) is None:
            return math.inf
        rows = [Contender("plan", bound), before]
        least, usual = evaluate(task.judging_scenes, rows, replay=task.replay).judged.values()
        known = self.metric in least.value and self.metric in usual.value
        share = least.share(self.metric, usual) if known else None
        return math.inf if share is None else share.value

    def gain_over_today(self, decided: "Decided") -> tuple[Metric, dict[str, float], dict[str, float]]:
        """The gain over today on the part that judges, and the figures of both; errors as in `solve_component`."""
        from ...solve import plan_and_today

        task = decided.task
        plan, usual = plan_and_today(task, decided.plan, decided.sidecars)
        evaluated = self.evaluated(task, usual, plan)
        ours, todays = evaluated.judged[plan.label], self.figures_of_today[_seen(task, usual)]
        if self.metric not in ours.value or self.metric not in todays.value:
            missing = evaluated.seconds.missing if evaluated.seconds else {}
            raise InputError(
                f"its {METRICS[self.metric].noun} is not known: no seconds of {', '.join(missing) or 'this dispatch'}"
            )
        share = ours.share(self.metric, todays) or Metric(value=0.0, low=None, high=None)
        return share, ours.value, todays.value

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
            engine_rule=None if self.engine is None else self.engine.replica_rule,
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

    def options(self, chosen: Tried, anew: "Mapping[Components, Decided]") -> AutoOptions:
        """The record of the search, the chosen candidate first: all on what is held out, the first and the components
        that it stands on as solved anew.

        At the time limit those that it leaves time for, and what was solved anew; at Ctrl-C those judged until then.
        """
        best, *others = self.ranked()
        records, limit_s = {best: chosen}, self.params.time_limit_s or math.inf
        try:
            for candidate in others:
                if candidate.components not in anew and self.elapsed_s + candidate.wall_s > limit_s:
                    self.status = Status.TIME_LIMIT if self.status is Status.FEASIBLE else self.status
                    continue
                records[candidate] = self.record_held_out(candidate, anew.get(candidate.components))
        except KeyboardInterrupt:
            self.status = Status.INTERRUPTED
        listed = best_of_each([*records], lambda part: (part.without_replicas, part == part.without_replicas))
        rows = [row.model_copy(update={"listed": candidate in listed}) for candidate, row in records.items()]
        refused = {named(components): reason for components, reason in self.refused.items()}
        return AutoOptions(
            engine=self.params.engine, metric=self.metric, tried=tuple(rows), refused=refused, status=self.status
        )

    def record_held_out(self, candidate: Candidate, decided: "Decided | None") -> Tried:
        """A candidate on what is held out, as decided on the inner split unless it was decided anew."""
        if decided is None:
            base = self.tried.get(candidate.components[:-1])
            task = self.task_of(candidate.components[-1], base.solved if base else None, inner=False)
            decided = replace(candidate.solved, task=task)
        share, ours, usual = self.gain_over_today(decided)
        return record(candidate, decided.plan, share, ours, usual)


class CannotGainError(UsageError):
    """A component cannot gain what matters where it stands."""


def _seen(task: Task, usual: Contender) -> tuple[Hashable, ...]:
    """Key of everything that the figures of today's contender depend on."""
    return (usual.label, *(scene for _, scene in task.judging_scenes))
