"""Auto: the best combination of strategies, chosen on an inner split of the fitted samples.

The best candidate of the search is solved anew on all fitted units and judged, as every plan, on those held out. A
strategy is tried by its row in the registry: where it may stand is what it says itself (`beside`, `uses`, `variants`).
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....errors import CertificationError, UsageError
from ....runtime.decisions import SamplePolicyDecision
from ....runtime.exports import ENGINES, PERMUTE, engines_of, titled, unserved
from ....runtime.plan import Metric, Plan
from ....solvers.outcome import Status
from ...certify.certificate import Certificate
from ...evaluate.evaluate import MATTERS
from ...figures import percent
from ...params import Params
from ...task import Task
from ..strategy import Recheck, Strategy
from . import AutoParams
from .candidate import Candidate, Components, named, record, within_1_percent
from .options import AutoOptions, Tried
from .search import Search
from .sections import remarks, table

if TYPE_CHECKING:
    from ...solve import Decided, Solved


class Auto(Strategy):
    """The strategies together."""

    name = "auto"
    dispatch_models = ("standard", "coherent", "migrating")
    unchecked = "what other candidates of auto give"
    remarks = staticmethod(remarks)
    table = staticmethod(table)

    def variants(self, task: Task, engine: str | None = None) -> Sequence[Params]:
        """No variants: auto does not try itself."""
        return ()

    def check(self, task: Task) -> None:
        """Refuse an engine that cannot carry a placement for the trace's model."""
        super().check(task)
        engine = AutoParams.of(task.params).engine
        if task.request.waterfill and not (engine and ENGINES[engine].fills):
            able = " or ".join(name for name, one in ENGINES.items() if one.fills)
            found = f"with --engine {engine}" if engine else "without --engine"
            raise UsageError(f"--waterfill {found}; expected --engine {able}")
        if engine and task.wire is not None:
            raise UsageError(
                f"--engine {engine} with --wire {task.wire}, which moeplan.runtime alone carries out; leave one out"
            )
        if engine and (why := unserved(ENGINES[engine], task.model)):
            others = [titled(other) for other in ENGINES.values() if not unserved(other, task.model)]
            raise UsageError(f"--engine {engine}: {why}; expected one of {', '.join(others)}. For {engine} {PERMUTE}")

    def make(self, task: Task) -> "Solved":
        """The best plan for a task; errors as in `Search.run`."""
        from ...solve import Solved

        search = Search(task, AutoParams.of(task.params), time.perf_counter())
        search.run()
        best = search.ranked()[0]
        try:
            anew, plan = _solved_anew(search, best)
        except KeyboardInterrupt:
            if search.status is Status.INTERRUPTED:
                raise
            search.status = Status.INTERRUPTED
            anew, plan = _solved_anew(search, best)  # once more, in little time
        ours, today = _figures(plan)
        options = search.options(record(best, plan, _share(plan, search.metric), ours, today), anew)
        every = {**plan.options, self.name: options.model_dump(mode="json")}
        plan = Plan.model_validate(plan.model_copy(update={"options": every}).model_dump())
        ended = {options.status, *(outcome.status for outcome in plan.outcome.values())}
        return Solved(plan, anew[best.components].sidecars, Status.INTERRUPTED in ended)

    def recheck(self, plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
        """Recheck that the chosen candidate is the plan, with its figures, and was the best of those compared."""
        options, same = AutoOptions.of(plan), Certificate().agree
        chosen, (ours, today) = options.tried[0], _figures(plan)
        stated = (
            tuple(name.partition(",")[0] for name in chosen.parts),
            chosen.decisions,
            chosen.dispatch_model,
            chosen.engines,
        )
        if stated != (plan.strategies, plan.decisions.names, plan.dispatch_model, engines_of(plan)):
            raise CertificationError(
                f"options.auto: chosen is {chosen.name}, {chosen.dispatch_model}, of {[*chosen.decisions]} for engines"
                f" {[*chosen.engines]}; the plan is {' + '.join(plan.strategies)}, {plan.dispatch_model}, of"
                f" {[*plan.decisions.names]} for {[*engines_of(plan)]}"
            )
        if options.engine is not None and options.engine not in chosen.engines:
            raise CertificationError(f"options.auto: made for {options.engine}, which does not carry the plan out")
        for what, claimed, expected in (("chosen", chosen.metrics, ours), ("today", chosen.today, today)):
            same(f"options.auto: metrics of {what}", sorted(claimed), sorted(expected))
            for name in expected:
                same(f"options.auto: {name} of {what}", claimed[name], expected[name])
        same("options.auto: share of chosen", chosen.share, _share(plan, options.metric))
        alike = [candidate for candidate in options.tried if _moves(candidate) == _moves(chosen)]
        others = [candidate for candidate in options.tried if candidate not in alike]
        if any(
            candidate.has_interval >= chosen.has_interval and candidate.inner - chosen.inner >= MATTERS
            for candidate in alike
        ) or (others and _loses(chosen, others)):
            raise CertificationError(f"options.auto: another one gained {percent(MATTERS)} more than {chosen.name}")
        certificate.checked("the chosen candidate of auto")

    def apply_flags(self, plan: Plan) -> str | None:
        """Flags of the engine that was asked for."""
        engine = AutoOptions.of(plan).engine
        return f" --engine {engine} -o {engine}" if engine else ""


def _solved_anew(search: Search, best: Candidate) -> tuple[dict[Components, "Decided"], Plan]:
    """The decisions of a candidate by all fitted units, each on top of those before, and the plan of all, judged."""
    from ...solve import decide, judge

    search.task.say(f"solving {named(best.components)} on all fitted samples")
    decided: Decided | None = None
    anew: dict[Components, Decided] = {}
    for end, component in enumerate(best.components, 1):
        decided = decide(search.task_of(component, decided, inner=False, search_s=search.last_search_s))
        anew[best.components[:end]] = decided
        if decided.solution.outcome.status is Status.INTERRUPTED:  # a search that kept its best
            search.status = Status.INTERRUPTED
    return anew, judge(anew[best.components]).plan


def _moves(candidate: Tried) -> bool:
    """Check whether samples move, so that the gain has another kind of interval."""
    return SamplePolicyDecision.key in candidate.decisions


def _loses(chosen: Tried, others: Sequence[Tried]) -> bool:
    """Check whether all that are about the best of others, whose intervals are of another kind, gain more."""
    about = within_1_percent(others, lambda candidate: candidate.inner)
    return all(
        candidate.has_interval >= chosen.has_interval and candidate.gain - chosen.gain >= MATTERS for candidate in about
    )


def _figures(plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a plan and of today on the part that judges; nothing of a plan that was not judged."""
    if plan.evaluation is None:
        return {}, {}
    rows = plan.evaluation.judging.contenders[:2]
    ours, today = ({name: figure.value for name, figure in row.metrics.items()} for row in rows)
    return ours, today


def _share(plan: Plan, metric: str) -> Metric:
    """A plan's gain over today in a metric, with the verdict's interval where that is its metric, too."""
    if plan.verdict is not None and plan.verdict.metric == metric and plan.verdict.share is not None:
        return plan.verdict.share
    ours, today = (figures.get(metric, 0.0) for figures in _figures(plan))
    return Metric(value=1 - ours / today if today else 0.0, low=None, high=None)


STRATEGY = Auto()
