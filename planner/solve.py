"""From a request to a Plan: the strategy's decision, added to those of the plan it stands on."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import sha256_file
from ..runtime.decisions import Decisions
from ..runtime.plan import FileInput, Inputs, Plan, Split, TraceInput, load
from ..solvers.outcome import Outcome
from ..traces.count_form import CountTrace
from .evaluate import verdict
from .replanned import check_horizon, previous_plan
from .request import Request
from .sidecars import save_with
from .solved import Solved
from .strategy import Strategy, strategy
from .task import Task

__all__ = ["Made", "make", "solve", "task_for"]


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, and the files that lie beside it, name to contents."""

    plan: Plan
    sidecars: Mapping[str, bytes]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan with its sidecars; parameters and errors as in `sidecars.save_with`."""
        save_with(self.sidecars, self.plan, Path(path))


def solve(request: Request, *, on_progress: Callable[[str], None] = lambda _: None) -> Plan:
    """The plan for a request.

    Parameters
    ----------
    on_progress
        Told what begins, in a few words.

    Raises
    ------
    UsageError
        The request cannot be met on this cluster, or not on this base.
    InputError
        The trace is damaged, or lacks what the strategy needs.
    """
    return make(request, on_progress=on_progress).plan


def make(request: Request, *, on_progress: Callable[[str], None] = lambda _: None) -> Made:
    """The plan for a request with its sidecars; parameters and errors as in `solve`."""
    chosen = strategy(request.strategy)
    task = task_for(chosen, request, on_progress)
    solved = chosen.solve(task)
    base, evaluated = task.base, solved.evaluated
    inputs = _inputs(task, solved)
    plan = Plan.make(
        strategies=(*(base.strategies if base else ()), chosen.name),
        seed=request.seed,
        cluster=request.cluster,
        model=task.source.meta.model,
        inputs=inputs,
        decisions=Decisions(**{**(dict(base.decisions) if base else {}), chosen.decides: solved.decision}),
        options=_options(task, chosen, solved),
        outcome={**_kept_outcomes(task, inputs), chosen.decides: solved.outcome},
        evaluation=evaluated.evaluation,
        verdict=verdict(
            evaluated, solved.metric or chosen.judged_on(task.dispatch_model, request.cluster), solved.against
        ),
    )
    return Made(plan, solved.sidecars)


def task_for(chosen: Strategy, request: Request, say: Callable[[str], None]) -> Task:
    """The task that a strategy is given, where the request goes with it; errors as in `solve`."""
    previous = previous_plan(request)
    usual = chosen.dispatch_models[0] if previous is None else previous.dispatch_model
    model = request.dispatch_model or usual
    if model not in chosen.dispatch_models:
        raise UsageError(
            f"--dispatch {model} with --strategy {chosen.name}; expected {' or '.join(chosen.dispatch_models)}"
        )
    if request.method is not None and request.method not in chosen.methods:
        expected = " or ".join(chosen.methods) or "none, it has one way only"
        raise UsageError(f"--method {request.method} with --strategy {chosen.name}; expected {expected}")
    if chosen.decides != "placement" and (request.slots is not None or request.redundant):
        raise UsageError(f"--slots or --redundant with --strategy {chosen.name}; it places no experts")
    own = chosen.methods[0] if chosen.methods else None
    task = Task(request, _base(chosen, request), model, request.method or own, say, previous)
    check_horizon(task)
    return task


def _base(chosen: Strategy, request: Request) -> Plan | None:
    """The plan that the decision is added to, where the two go together."""
    if request.on is None:
        return None
    base = load(request.on)
    if other := [name for name in base.decisions.names if name not in chosen.beside]:
        what = "again" if chosen.decides in other else f"beside {' and '.join(other)}"
        raise UsageError(
            f"--on {request.on}: it decides {' and '.join(other)}; {chosen.name} decides {chosen.decides}, not {what}:"
            f" expected a plan of {' and '.join(chosen.beside) or 'nothing; leave --on away'}"
        )
    if base.dispatch_model == "coherent":
        raise UsageError(
            f"--on {request.on}: coherent dispatch, which has one exchange a layer or moves tokens on;"
            f" {chosen.name} needs tokens that return: solve that plan with --dispatch standard"
        )
    if (base.cluster.num_nodes, base.cluster.devices_per_node) != (
        request.cluster.num_nodes,
        request.cluster.devices_per_node,
    ):
        raise UsageError(
            f"--on {request.on}: a plan for {base.cluster}, asked for {request.cluster}; leave --cluster away"
        )
    return base


def _inputs(task: Task, solved: Solved) -> Inputs:
    request, trace = task.request, task.source
    num_tokens = solved.num_tokens
    if num_tokens is None:
        counts = isinstance(trace, CountTrace)
        num_tokens = int(task.surveyed.unit_tokens.sum()) if counts else task.trace.num_tokens
    split = Split(fit_fraction=request.fit_fraction, seed=request.seed)
    return Inputs(
        trace=TraceInput(path=str(trace.path), sha256=trace.sha256, num_tokens=num_tokens, split=split),
        profile=_file(request.profile),
        base=_file(request.on),
    )


def _file(path: Path | None) -> FileInput | None:
    return None if path is None else FileInput(path=str(path), sha256=sha256_file(path))


def _options(task: Task, chosen: Strategy, solved: Solved) -> dict[str, Mapping[str, Any]]:
    """How each decision was made, and how this plan was judged; a base's own judgement stays with the base."""
    base, evaluated = task.base, solved.evaluated
    kept = {name: dict(base.options[name]) for name in base.decisions.names if name in base.options} if base else {}
    judged_by = solved.judged_by or task.evaluation_options
    own = {chosen.decides: solved.options, "evaluation": judged_by, "seconds": evaluated.seconds}
    return kept | {name: options.model_dump(mode="json") for name, options in own.items() if options is not None}


def _kept_outcomes(task: Task, inputs: Inputs) -> dict[str, Outcome]:
    """The base's outcomes where they are of the very units that are fitted here, so that they can be certified here."""
    base, trace = task.base, inputs.trace
    if base is None or base.inputs.trace is None or trace is None:
        return {}
    if base.options.get("placement", {}).get("mixture"):
        return {}
    alike = (base.inputs.trace.sha256, base.inputs.trace.split) == (trace.sha256, trace.split)
    phases = base.options.get("evaluation", {}).get("phases")
    return dict(base.outcome) if alike and phases == list(task.request.phases) else {}
