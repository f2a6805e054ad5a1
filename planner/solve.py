"""From a request to a Plan: the strategy's decision, added to those of the plan it stands on, judged against today."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import sha256_file
from ..runtime.decisions import WIRED, Decisions, PlacementDecision, SidecarFile
from ..runtime.plan import FileInput, Inputs, Plan, SizedGain, Split, TraceInput, load
from ..solvers.outcome import Outcome, Status
from ..traces.count_form import CountTrace
from ..workers import Workers
from .evaluate.evaluate import Evaluated, evaluate, verdict
from .evaluate.journey import EXACTLY, WITHOUT_WATERFILL, Contender, contiguous_in, distinct, journey_of, today
from .evaluate.metrics import METRICS
from .evaluate.scene import check_waterfill
from .options import EvaluationOptions
from .request import Request
from .sidecars import save_with
from .strategies.registry import decided_by, strategy
from .strategies.strategy import Solution, Strategy
from .task import Task

SIZES = (0.25, 1, 4)  # times the step: sizes at which a plan is judged


@dataclass(frozen=True, slots=True)
class Solved:
    """A plan, and the files that lie beside it, name to contents."""

    plan: Plan
    sidecars: Mapping[str, bytes]
    interrupted: bool = False  #: Whether Ctrl-C ended the search, so that this is the best found until then

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with its sidecars; parameters and errors as in `sidecars.save_with`."""
        save_with(self.sidecars, self.plan, Path(path))


def solve(
    request: Request, *, on_progress: Callable[[str], None] = lambda _: None, workers: Workers | None = None
) -> Plan:
    """The plan for a request; `on_progress` is told what begins, in a few words.

    It is the same whichever `workers` compute it.

    Raises
    ------
    UsageError
        The request cannot be met on this cluster, or not on this base.
    InputError
        The trace is damaged, or lacks what the strategy needs.
    """
    return make(request, on_progress=on_progress, workers=workers).plan


def make(
    request: Request, *, on_progress: Callable[[str], None] = lambda _: None, workers: Workers | None = None
) -> Solved:
    """The plan for a request with its sidecars; parameters and errors as in `solve`."""
    task = task_for(request, on_progress, workers)
    return task.strategy.make(task)


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of a task with its evidence, and the plan that holds it, not judged yet."""

    task: Task
    plan: Plan
    solution: Solution
    sidecars: Mapping[str, bytes]  #: Files that the plan's decisions name, name to contents


def decide(task: Task) -> Decided:
    """The decision of a task's strategy, added to those of its base."""
    request, chosen, base = task.request, task.strategy, task.base
    solution, inputs, before = chosen.solve(task), _inputs(task), dict(base.decisions) if base else {}
    before |= {chosen.decides: solution.decision, "dispatch": task.dispatch_model, "wire": task.wire}
    plan = Plan.make(
        strategies=(*(base.strategies if base else ()), chosen.name),
        seed=request.seed,
        cluster=request.cluster,
        model=task.model,
        inputs=inputs,
        decisions=Decisions(**before),
        options=_options(task, solution, None),
        outcome={**_kept_outcomes(task, inputs), chosen.decides: solution.outcome},
    )
    return Decided(task, plan, solution, {**task.base_files, **solution.sidecars})


def judge(decided: Decided) -> Solved:
    """The plan with its evaluation beside its rivals, and the verdict."""
    task, chosen, plan = decided.task, decided.task.strategy, decided.plan
    task.say("replaying the trace under the plan and its rivals")
    rivals = contenders(task, plan, decided.sidecars)
    evaluated = evaluate(task.scenes, rivals, aside=decided.solution.aside, replay=task.replay)
    solution = chosen.with_figures(task, decided.solution, evaluated)
    metric = chosen.judged_on(task.scene, plan.dispatch_model)
    judgement = verdict(evaluated, metric, against=rivals[1].label, at_least=chosen.min_gain)
    judged = {
        "options": _options(task, solution, evaluated),
        "outcome": {**plan.outcome, chosen.decides: solution.outcome},
        "evaluation": evaluated.evaluation,
        "verdict": judgement.model_copy(update={"sizes": sizes(task, rivals[:2], evaluated, judgement.metric)}),
    }
    whole = Plan.model_validate(plan.model_copy(update=judged).model_dump())
    return Solved(whole, decided.sidecars, solution.outcome.status is Status.INTERRUPTED)


def sizes(task: Task, rivals: Sequence[Contender], evaluated: Evaluated, metric: str) -> tuple[SizedGain, ...]:
    """The plan's gain over today at a quarter, one and four times the step, on the part that judges.

    None of steps that were recorded, of a metric that does not go by steps, and of sizes that cannot be judged: small
    steps are too many, or leave a fixed capacity without rows.
    """
    if task.evaluation_options.size is None or METRICS[metric].per != "step":
        return ()
    gains = list[SizedGain]()
    for factor in SIZES:
        try:
            judged = evaluated if factor == 1 else evaluate(task.resized(factor), rivals, replay=task.replay)
        except UsageError:
            continue
        part, gain = judged.evaluation.judging, verdict(judged, metric, against=rivals[1].label)
        if gain.share is not None and all(size.tokens_per_step != part.tokens_per_step for size in gains):
            gains.append(SizedGain(tokens_per_step=part.tokens_per_step, share=gain.share))
    return tuple(gains)


def plan_and_today(task: Task, plan: Plan, sidecars: Mapping[str, bytes]) -> list[Contender]:
    """The plan and what runs today; errors as in `journey_of`."""

    def read(file: SidecarFile) -> bytes:
        if file.file in sidecars:
            return sidecars[file.file]
        assert task.request.on is not None  # of the base's decisions
        return file.read(task.request.on.parent)

    journey = task.strategy.journey_of_plan(task, plan, journey_of(plan, read))
    usual = today(plan.model, plan.cluster, journey.placement.slots)
    return [Contender("plan", journey).served(task.engine_rule), usual]


def contenders(task: Task, plan: Plan, sidecars: Mapping[str, bytes]) -> list[Contender]:
    """The plan, today, and what else it is judged beside; errors as in `journey_of`.

    All but today travel as the plan does. What that gains alone is beside them, and the plan without it.
    """
    planned, usual = plan_and_today(task, plan, sidecars)
    journey, rows = planned.journey, [planned, usual]
    rivals = task.strategy.rivals(task, plan, journey)
    if (wire := journey.wire) is not None:
        rows += [usual.wired(wire), planned.named(EXACTLY, wire=None)]
        rivals = [rival if rival.journey.wire else rival.wired(wire) for rival in rivals]
    if task.request.waterfill:
        rows.append(planned.named(f"plan, {WITHOUT_WATERFILL}", shared_at_home=True))
    in_slots = contiguous_in(journey.placement.slots, plan.model, plan.cluster, journey.rule)
    rows += [in_slots.wired(wire), *(rival.served(task.engine_rule) for rival in rivals)]
    return distinct(rows)


def task_for(request: Request, say: Callable[[str], None] = lambda _: None, workers: Workers | None = None) -> Task:
    """The task that a strategy is given, where the request goes with it; errors as in `solve`."""
    chosen = strategy(request.strategy).deciding({request.params.decides})
    previous = _previous(request)
    usual = chosen.dispatch_models[0] if previous is None else previous.dispatch_model
    if request.wire is not None and WIRED in chosen.dispatch_models:
        usual = WIRED
    model = request.dispatch_model or usual
    if model not in chosen.dispatch_models:
        raise UsageError(
            f"--dispatch {model} with --strategy {chosen.name}; expected {' or '.join(chosen.dispatch_models)}"
        )
    task = Task(request, chosen, _base(chosen, request), model, say, workers, previous)
    if task.wire is not None and model != WIRED:
        raise UsageError(
            f"{task.wire} rows with --strategy {chosen.name}, under {model} dispatch; expected {WIRED}: leave out"
            " --wire, or the plan that decides it"
        )
    if request.waterfill:
        _check_waterfill(task)
    chosen.check(task)
    return task


def _check_waterfill(task: Task) -> None:
    """Refuse shared experts as load where SGLang, which alone fills up, would not carry the plan out."""
    request, chosen = task.request, task.strategy
    mend = "expected a placement alone, for standard dispatch and serving"
    if chosen.decides not in ("", PlacementDecision.key) or request.on is not None:
        base = "" if request.on is None else f" --on {request.on}"
        raise UsageError(f"--waterfill with --strategy {chosen.name}{base}; {mend}")
    if task.dispatch_model != "standard" or task.wire is not None:
        how = f"under {task.dispatch_model} dispatch" if task.wire is None else f"of {task.wire} rows"
        raise UsageError(f"--waterfill with --strategy {chosen.name} {how}; {mend}")
    check_waterfill(task.source, task.model)
    if task.use == "training":
        raise UsageError(f"--waterfill in training; {mend}: give --for serving")


def _previous(request: Request) -> Plan | None:
    """The plan in force, where there is one: a placement for this cluster and nothing that rests on it."""
    if (path := request.previous) is None:
        return None
    plan = load(path)
    if plan.decisions.names != ("placement",):
        mend, base = "leave --from out, which plans anew", plan.inputs.base
        if base is not None and base.path is not None:
            mend = f"give the plan that it was added to, {base.path}, then add the rest again with --on"
        raise UsageError(
            f"--from {path}: it decides {' and '.join(plan.decisions.names) or 'nothing'}; expected a placement alone:"
            f" {mend}"
        )
    _check_cluster("--from", path, plan, request)
    return plan


def _base(chosen: Strategy, request: Request) -> Plan | None:
    """The plan that the decision is added to, where the two go together."""
    if request.on is None:
        return None
    if not chosen.decides:
        raise UsageError(f"--on with --strategy {chosen.name}; say which strategy adds to that plan")
    base = load(request.on)
    if other := [name for name in base.decisions.names if name not in chosen.beside]:
        what = "again" if chosen.decides in other else f"beside {' and '.join(other)}"
        mend = f"expected a plan of {' and '.join(sorted(chosen.beside))}" if chosen.beside else "leave --on away"
        raise UsageError(
            f"--on {request.on}: it decides {' and '.join(other)}; {chosen.name} decides {chosen.decides}, not {what}:"
            f" {mend}"
        )
    if base.dispatch_model == "coherent":
        raise UsageError(
            f"--on {request.on}: coherent dispatch, which has one exchange a layer or moves tokens on;"
            f" {chosen.name} needs tokens that return: solve that plan with --dispatch standard"
        )
    _check_cluster("--on", request.on, base, request)
    return base


def _check_cluster(flag: str, path: Path, plan: Plan, request: Request) -> None:
    """Refuse a plan for another cluster; its links may be others."""
    if str(plan.cluster) != str(request.cluster):
        raise UsageError(f"{flag} {path}: a plan for {plan.cluster}, asked for {request.cluster}; leave --cluster away")


def _inputs(task: Task) -> Inputs:
    request, trace = task.request, task.source
    counts = isinstance(trace, CountTrace)
    num_tokens = int(task.index.unit_tokens.sum()) if counts else task.trace.num_tokens
    split = Split(fit_fraction=task.fit_fraction, seed=request.seed)
    profile, base = (
        None if path is None else FileInput(path=str(path), sha256=sha256_file(path))
        for path in (request.profile, request.on)
    )
    source = TraceInput(path=str(trace.path), sha256=trace.sha256, num_tokens=num_tokens, split=split)
    return Inputs(trace=source, profile=profile, base=base)


def _options(task: Task, solution: Solution, evaluated: Evaluated | None) -> dict[str, Mapping[str, Any]]:
    """Options of each decision and of this plan's judgement; a base's own judgement stays with the base."""
    base, decides = task.base, task.strategy.decides
    kept = {name: dict(base.options[name]) for name in base.decisions.names if name in base.options} if base else {}
    seconds = None if evaluated is None else evaluated.seconds
    records = {decides: solution.options, "evaluation": task.evaluation_options, "seconds": seconds}
    return kept | {name: options.model_dump(mode="json") for name, options in records.items() if options is not None}


def _kept_outcomes(task: Task, inputs: Inputs) -> dict[str, Outcome]:
    """The base's outcomes where they are of the very units that are fitted here, so that they can be certified here.

    Those that depend on steps, profile and links are kept where these are the base's, too.
    """
    base, request = task.base, task.request
    if base is None or base.options.get("placement", {}).get("mixture"):
        return {}
    before, judged = base.inputs, base.options.get("evaluation", {})
    units, units_now = (source and (source.sha256, source.split) for source in (before.trace, inputs.trace))
    if units != units_now or judged.get("phases") != list(request.phases):
        return {}
    profile, profile_now = (file and file.sha256 for file in (before.profile, inputs.profile))
    same_steps = EvaluationOptions.of(base).size == task.evaluation_options.size
    if same_steps and profile == profile_now and base.cluster == request.cluster:
        return dict(base.outcome)
    by_steps = {chosen.decides for chosen in decided_by(base) if chosen.by_steps}
    if not same_steps:
        by_steps |= {name for name, outcome in base.outcome.items() if outcome.objective.name.startswith("step_")}
    return {name: outcome for name, outcome in base.outcome.items() if name not in by_steps}
