"""Auto: every strategy alone, the best ones with others on top, each part in turn replaced until nothing gains.

Candidates are decided by one part of the fitted units and compared on the rest of these, all in percent of what today's
step takes there; without seconds, of today's load on the busiest device. The best one is solved anew on all fitted
units and judged, as every plan, on those held out. What adds less than 1 % is left out.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ....errors import MoeplanError, UsageError
from ....runtime.decisions import TRAINED, DispatchModel
from ....runtime.exports import ENGINES
from ....runtime.plan import Plan
from ...evaluate.evaluate import MATTERS, Evaluated, evaluate, verdict
from ...evaluate.journey import Contender
from ...evaluate.metrics import BALANCE
from ...evaluate.price import STEP
from ...options import AutoOptions, Tried
from ...params import Params
from ...task import Task
from ..registry import STRATEGIES, strategy
from ..strategy import Strategy
from . import AutoParams
from .sections import remarks, table

if TYPE_CHECKING:
    from ...solve import Decided, Made

BEAM = 2  # candidates that others are put on top of
TRIAL_S = 5.0  # of a search, of a candidate
SHARE = 0.25  # of the time limit, at most, for a search


@dataclass(frozen=True, slots=True)
class Part:
    """A strategy under a dispatch model, with its parameters."""

    strategy: Strategy
    dispatch_model: DispatchModel
    params: Params

    @property
    def name(self) -> str:
        """Name on a screen."""
        replicas = getattr(self.params, "redundant", 0)
        dispatch = f", {self.dispatch_model}" if len(self.strategy.dispatch_models) > 1 else ""
        return f"{self.strategy.name}{dispatch}{f', {replicas} replicas' if replicas else ''}"


Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Parts decided one on top of the other, and their gain over today on the inner split."""

    parts: Parts
    decided: "Decided"
    gain: float  #: A share of what today has
    shown: bool  #: Whether the gain has an interval, as that of samples in a single step has not

    @property
    def needs(self) -> tuple[float, ...]:
        """What it asks for, the least first: parts to carry out, and slots."""
        placement = self.decided.plan.placement
        return (len(self.parts), 0 if placement is None else placement.num_slots, -self.gain)


class Auto(Strategy):
    """The strategies together."""

    name = "auto"
    dispatch_models = ("standard", "coherent", "migrating")
    remarks = staticmethod(remarks)
    table = staticmethod(table)

    def variants(self) -> Sequence[Params]:
        """None: it is no part of itself."""
        return ()

    def check(self, task: Task) -> None:
        """Refuse a base and a plan in force."""
        for name, path in (("--on", task.request.on), ("--from", task.request.previous)):
            if path is not None:
                raise UsageError(f"{name} without --strategy; say which strategy adds to that plan, or replaces it")

    def make(self, task: Task) -> "Made":
        """The best plan for a task; UsageError where no strategy can plan for it."""
        search = Search(task, AutoParams.of(task.params))
        search.run()
        return search.made()


@dataclass(eq=False)
class Search:
    """The candidates of a task."""

    task: Task
    params: AutoParams
    tried: dict[Parts, Candidate] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  #: Why parts could not be tried, by name
    stopped: bool = False  #: By Ctrl-C
    started: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        """Try every part alone, the best ones with others on top, then other parts in place of each."""
        try:
            for part in self.parts():
                self.attempt((part,))
            while self.tried and self.gains((*self.grown(), *self.replaced())):
                pass
        except KeyboardInterrupt:
            if not self.tried:
                raise
            self.stopped = True
        if not self.tried:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise UsageError(f"no strategy can plan by this: {reasons or '--time-limit is too short'}")

    def parts(self) -> Iterator[Part]:
        """Parts that the use, the engine and the dispatch model asked for allow; those that search long come last."""
        asked, use, engine = self.task.request.dispatch_model, self.task.use, self.params.engine
        for chosen in sorted(map(strategy, STRATEGIES), key=searches):
            for model, params in itertools.product(chosen.dispatch_models, chosen.variants()):
                part = Part(chosen, model, params)
                if use and (use not in chosen.uses or (use == "training" and model not in TRAINED)):
                    self.refused[part.name] = f"not for {use}"
                elif engine and (chosen.decides not in ENGINES[engine].carries or model != "standard"):
                    self.refused[part.name] = f"{engine} does not carry it out"
                elif asked in (None, model):
                    yield part

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.started

    def ranked(self) -> list[Candidate]:
        """The candidates: the one that needs least of those within 1 % of the best, then by what they gain."""
        rows = sorted(
            {one.parts: one for one in self.tried.values()}.values(), key=lambda one: (not one.shown, -one.gain)
        )
        near = [one for one in rows if one.shown == rows[0].shown and one.gain > rows[0].gain - MATTERS]
        best = min(near, key=lambda one: one.needs)
        return [best, *(one for one in rows if one is not best)]

    def gains(self, others: Sequence[Parts]) -> bool:
        """Attempt some; whether one of them is better than all before."""
        before = self.ranked()[0]
        for parts in others:
            self.attempt(parts)
        return self.ranked()[0] is not before

    def grown(self) -> Iterator[Parts]:
        """The best candidates with one part more on top, of those that gain alone."""
        for candidate, part in itertools.product(self.ranked()[:BEAM], self.gaining()):
            yield (*candidate.parts, part)

    def replaced(self) -> Iterator[Parts]:
        """The best candidate with another part in place of each of several."""
        parts = self.ranked()[0].parts
        for at, other in itertools.product(range(len(parts)), self.gaining()):
            if len(parts) > 1 and other.strategy.decides == parts[at].strategy.decides:
                yield (*parts[:at], other, *parts[at + 1 :])

    def gaining(self) -> list[Part]:
        """The parts that gain alone."""
        alone = (one for one in self.ranked() if len(one.parts) == 1)
        return [one.parts[0] for one in alone if one.gain >= MATTERS]

    def attempt(self, parts: Parts) -> None:
        """Decide the last part on top of the others and compare it with today; what cannot be decided is refused."""
        name, before = named(parts), parts[:-1]
        if parts in self.tried or name in self.refused:
            return
        if before and before not in self.tried:
            self.attempt(before)
        base, limit = self.tried.get(before), self.params.time_limit_s
        if (before and not (base and stands_on(parts[-1], base))) or (limit and self.elapsed_s > limit):
            return
        self.task.say(f"trying {name}")
        try:
            candidate = self.judged((*(base.parts if base else ()), parts[-1]), base)
        except MoeplanError as error:
            self.refused[name] = str(error)
            return
        self.tried |= {parts: candidate, candidate.parts: self.tried.get(candidate.parts, candidate)}

    def judged(self, parts: Parts, base: Candidate | None) -> Candidate:
        """The candidate of these parts, the last not yet decided; InputError where nothing is gained or lost."""
        from ...solve import decide

        part = parts[-1]
        decided = decide(self.task_of(part, base.decided if base else None, inner=True))
        evaluated = judged_beside_today(decided)
        metric = STEP if all(STEP in one.value for one in evaluated.judged.values()) else BALANCE
        share = verdict(evaluated, metric).share
        settled = replace(part, params=part.strategy.settled(part.params, decided.plan))
        gain, shown = (share.value, share.low is not None) if share else (0.0, True)
        return Candidate((*parts[:-1], settled), decided, gain, shown)

    def task_of(self, part: Part, base: "Decided | None", *, inner: bool) -> Task:
        """The task of a part on top of what was decided, in the same steps as all others."""
        plan, files = (base.plan, base.sidecars) if base else (None, {})
        limit_s = SHARE * (self.params.time_limit_s or math.inf)
        request = replace(
            self.task.request.sized(self.task.size),
            strategy=part.strategy.name,
            params=part.params.within(min(limit_s, TRIAL_S) if inner else limit_s),
            dispatch_model=part.dispatch_model,
        )
        task = replace(
            self.task,
            request=request,
            strategy=part.strategy,
            base=plan,
            base_files=files,
            dispatch_model=part.dispatch_model,
            inner=inner,
        )
        part.strategy.check(task)
        return task

    def made(self) -> "Made":
        """The best candidate solved anew on all that is fitted, beside all others on what is held out."""
        from ...solve import Made, decide, judge

        best = self.ranked()[0]
        rows = [self.row(candidate) for candidate in self.ranked()]
        self.task.say(f"solving {named(best.parts)} on all fitted samples")
        decided: Decided | None = None
        for part in best.parts:
            decided = decide(self.task_of(part, decided, inner=False))
        assert decided is not None
        plan, sidecars = (made := judge(decided)).plan, made.sidecars
        assert plan.evaluation is not None
        ours, today, *_ = plan.evaluation.judging.contenders
        rows[0] = rows[0].model_copy(
            update={
                "share": plan.verdict and plan.verdict.share,
                "metrics": {name: one.value for name, one in ours.metrics.items()},
                "today": {name: one.value for name, one in today.metrics.items()},
            }
        )
        own = AutoOptions(engine=self.params.engine, tried=tuple(rows), refused=self.refused, interrupted=self.stopped)
        options = {**plan.options, "auto": own.model_dump(mode="json")}
        return Made(Plan.model_validate(plan.model_copy(update={"options": options}).model_dump()), sidecars)

    def row(self, candidate: Candidate) -> Tried:
        """A candidate, as decided on the inner split, on what is held out."""
        before = candidate.parts[:-1]
        base = self.tried[before].decided if before else None
        task = self.task_of(candidate.parts[-1], base, inner=False)
        evaluated = judged_beside_today(replace(candidate.decided, task=task))
        ours, today = (one.value for one in evaluated.judged.values())
        metric = STEP if STEP in ours and STEP in today else BALANCE
        return Tried(
            parts=tuple(part.name for part in candidate.parts),
            dispatch_model=candidate.decided.plan.dispatch_model,
            engines=engines_of(candidate.decided.plan),
            inner=candidate.gain,
            shown=candidate.shown,
            share=verdict(evaluated, metric).share,
            metrics=ours,
            today=today,
        )


def judged_beside_today(decided: "Decided") -> Evaluated:
    """A decided plan and today on the part that judges alone."""
    from ...solve import plan_and_today

    task = decided.task
    rows: list[Contender] = plan_and_today(task, decided.plan, decided.sidecars)
    scenes = [(weight, replace(scene, cohorts=scene.cohorts[-1:])) for weight, scene in task.scenes]
    return evaluate(scenes, rows, replay=task.replay)


def stands_on(part: Part, base: Candidate) -> bool:
    """Check whether a part may be decided beside what a candidate decides."""
    plan, chosen = base.decided.plan, part.strategy
    decided = {*plan.decisions.names}
    return decided <= chosen.beside and chosen.decides not in decided and plan.dispatch_model != "coherent"


def engines_of(plan: Plan) -> tuple[str, ...]:
    """Engines whose files carry all decisions of a plan."""
    if plan.dispatch_model != "standard":
        return ()
    return tuple(name for name, engine in ENGINES.items() if {*plan.decisions.names} <= engine.carries)


def searches(chosen: Strategy) -> bool:
    """Check whether a strategy searches as long as it may."""
    return any(one.within(0.5) != one for one in chosen.variants())


def named(parts: Parts) -> str:
    """Name of several parts on a screen."""
    return " + ".join(part.name for part in parts)


STRATEGY = Auto()
