"""PipeMoE: how deep to pipeline each MoE layer under a placement (solvers/pipemoe)."""

import time

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, UsageError
from ..runtime.decisions import PipelineDecision
from ..solvers.outcome import ROUNDING, Objective, Outcome, Status
from ..solvers.pipemoe import TUTEL_MAX_DEGREE
from .evaluate import Replayed, judge
from .measures.dropped import dropped_share, sent_pairs
from .measures.replay import replay
from .measures.speeds import Speeds
from .measures.tally import Route, Tally
from .options import MAX_SECONDS, PipelineOptions, StageSeconds
from .pipeline.cut import Cut, Cuts
from .pipeline.degrees import DegreeTable, tabulated, unequal
from .pipeline.pipelined import Pipeline
from .solved import Solved
from .task import Task

__all__ = ["BACKWARD", "rivals", "solve"]

BACKWARD = 2.0  # the gradients of inputs and of weights are two products for each of forward
REMEDIES = {
    "the profile": "; join it with one that has, by moeplan profile --merge",
    "the model": "; say it at moeplan trace import",
}
BASELINES = ("degree_1", "one_degree", "paper", "exact")


def solve(task: Task) -> Solved:
    """The degrees of every layer, by the tokens of the busiest device and port on the fitted steps.

    Raises
    ------
    UsageError
        There is no profile; a fixed capacity under replicas, or one of no row.
    InputError
        The profile cannot time an exchange or the experts, or says absurd times; no token is routed.
    """
    trace, speeds, cohorts = task.trace, _speeds(task), task.cohorts
    task.say("replaying the trace under the placement")
    route = Route("plan", task.dispatch_model, task.placement)
    phases = task.request.phases or None
    rows = replay(trace, cohorts, [route], task.request.cluster, phases=phases, ports=True)
    pipelines = [_pipeline(task, tally, speeds) for (tally,) in rows]
    task.say("solving pipemoe")
    started = time.perf_counter()
    table = tabulated(pipelines[0], task.request.max_degree or TUTEL_MAX_DEGREE, joint=task.request.joint)
    _check_seconds(table)
    uneven = task.method == "unequal"
    decision = unequal(pipelines[0], table) if uneven else table.degrees(str(task.method))
    cuts = {"plan": Cuts.of(decision)}
    outcome = _unbounded(pipelines[0], cuts["plan"], started) if uneven else _outcome(table, decision, started)
    baselines = {name: table.degrees(name) for name in rivals(task.method)}
    task.say("timing the plan and its baselines")
    cuts |= {name: Cuts.of(found) for name, found in baselines.items()}
    fixed = task.request.capacity_factor is not None
    sent = sent_pairs(trace, cohorts, task.request.cluster, phases=phases) if fixed else [None] * len(cohorts)
    timed = [
        [_replayed(name, cut, one, sent_BLDE) for name, cut in cuts.items()]
        for one, sent_BLDE in zip(pipelines, sent, strict=True)
    ]
    return Solved(
        decision=decision,
        options=_options(task, pipelines[0], table, cuts["plan"], baselines),
        outcome=outcome,
        evaluated=judge(cohorts, timed, task.model, speeds, seed=task.request.seed),
        against="degree_1/standard",
    )


def rivals(method: str | None) -> list[str]:
    """The baselines of a plan by `method`, by their names."""
    return [name for name in BASELINES if name != method]


def _speeds(task: Task) -> Speeds:
    """The curves of exchanges and experts, or what lacks."""
    if task.request.profile is None or task.speeds is None:
        raise UsageError(
            "no profile: pipemoe weighs the seconds of exchanges against those of experts; run moeplan profile, or name"
            " one with --profile"
        )
    curves = {"dispatch": task.speeds.exchange, "experts": task.speeds.experts}
    lacking = [_lacking(part, task.speeds.missing[part]) for part, curve in curves.items() if curve is None]
    if lacking:
        told = "; and ".join(lacking)
        raise InputError(f"{task.request.profile}: pipemoe needs the seconds of dispatch and experts; there are {told}")
    return task.speeds


def _lacking(part: str, reason: str) -> str:
    remedy = next((words for whose, words in REMEDIES.items() if reason.startswith(whose)), "")
    return f"none of {part}: {reason}{remedy}"


def _pipeline(task: Task, tally: Tally, speeds: Speeds) -> Pipeline:
    request, model = task.request, task.trace.model
    if not tally.loads.any():
        raise InputError(f"{task.trace.path}: no token is routed in the fitted, or in the held-out, steps")
    if request.capacity_factor is not None and (tally.slots != model.num_experts / len(tally.slots)).any():
        raise UsageError(
            f"--capacity-factor with {tally.slots.sum()} slots for {model.num_experts} experts; a fixed capacity needs"
            " every expert once and as many on every device"
        )
    factor = BACKWARD if task.surveyed.training else 0.0
    made = Pipeline(tally, speeds, request.cluster, model, factor, request.full_duplex, request.capacity_factor)
    if request.capacity_factor is not None and not made.capacity[tally.loads.any(axis=2)].all():
        raise UsageError(
            f"--capacity-factor {request.capacity_factor}: a buffer of int({request.capacity_factor:g} ceil(tokens /"
            " experts)) rows holds none in some step; expected a larger one, 1 is enough in every step"
        )
    return made


def _check_seconds(table: DegreeTable) -> None:
    """Refuse curves by which a layer takes longer than a plan may say."""
    longest = table.taken.max()
    if not longest <= MAX_SECONDS:
        raise InputError(
            f"an MoE layer takes {longest:.3g} s by the profile and the links; expected at most {MAX_SECONDS:g}:"
            " measure again, or correct --link"
        )


def _replayed(name: str, cuts: Cuts, pipeline: Pipeline, sent_BLDE: NDArray[np.int32] | None) -> Replayed:
    """A contender on a part; `sent_BLDE` as `dropped.sent_pairs` gives it where the capacity is fixed."""
    dropped = None if sent_BLDE is None else dropped_share(sent_BLDE, cuts.forward.padded(pipeline.capacity))
    return Replayed(name, "standard", pipeline.tally, pipeline.predicted(cuts), dropped)


def _outcome(table: DegreeTable, degrees: PipelineDecision, started: float) -> Outcome:
    """How near the degrees are to the best there are, which a search of all of them finds."""
    value, bound = table.seconds(degrees), table.seconds(table.degrees("exact"))
    return Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective("moe_s", value, "min"),
        bound=bound,
        bound_kind="full search",
        proven=value <= bound * (1 + ROUNDING),
        started=started,
        backend="moeplan",
    )


def _unbounded(pipeline: Pipeline, cuts: Cuts, started: float) -> Outcome:
    """What unequal chunks take; other shares might take less, under curves of any form nothing is proven."""
    value = float(pipeline.both(cuts).sum())
    objective = Objective("moe_s", value, "min")
    return Outcome.of(status=Status.FEASIBLE, objective=objective, started=started, backend="scipy highs")


def _options(
    task: Task, pipeline: Pipeline, table: DegreeTable, cuts: Cuts, baselines: dict[str, PipelineDecision]
) -> PipelineOptions:
    return PipelineOptions(
        method=str(task.method),
        max_degree=table.max_degree,
        joint=task.request.joint,
        full_duplex=pipeline.full_duplex,
        backward=pipeline.backward,
        placement="contiguous" if task.base is None else "base",
        baselines=baselines,
        a2a_ffn_overlap_degree=table.tutel,
        whole=_stages(pipeline, Cut.equal(1, pipeline.model.num_layers), 1.0),
        forward=_stages(pipeline, cuts.forward, 1.0),
        backward_pass=None if cuts.backward is None else _stages(pipeline, cuts.backward, pipeline.backward),
    )


def _stages(pipeline: Pipeline, cut: Cut, factor: float) -> StageSeconds:
    """What the stages of the chunks take on the fitted steps, mean over steps."""
    dispatch, experts, combine = (one.seconds.mean(axis=1).T for one in pipeline.chunks(cut).stages)

    def column(seconds_LC: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(row[:degree]) for row, degree in zip(seconds_LC.tolist(), cut.degree.tolist(), strict=True))

    return StageSeconds(dispatch_s=column(dispatch), experts_s=column(factor * experts), combine_s=column(combine))
