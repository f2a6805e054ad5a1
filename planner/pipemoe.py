"""PipeMoE: how deep to pipeline each MoE layer under a placement (solvers/pipemoe)."""

import time

import numpy as np

from ..errors import InputError, UsageError
from ..runtime.decisions import PipelineDecision
from ..solvers.outcome import ROUNDING, Objective, Outcome, Status
from ..solvers.pipemoe import TUTEL_MAX_DEGREE
from .degrees import DegreeTable, tabulated
from .evaluate import Replayed, cohorts_of, judge
from .options import PipelineOptions, StageSeconds
from .pipelined import Pipeline
from .replay import replay
from .solved import Solved
from .speeds import Speeds
from .tally import Route, Tally
from .task import Task

__all__ = ["BACKWARD", "rivals", "solve"]

BACKWARD = 2.0  # the gradients of inputs and of weights are two products for each of forward
BASELINES = ("degree_1", "one_degree", "paper", "exact")


def solve(task: Task) -> Solved:
    """The degrees of every layer, by the tokens of the busiest device and port on the fitted steps.

    Raises
    ------
    UsageError
        There is no profile.
    InputError
        The profile cannot time an exchange or the experts; no token is routed.
    """
    speeds, cohorts = _speeds(task), cohorts_of(task)
    task.say("replaying the trace under the placement")
    route = Route("plan", task.dispatch_model, task.placement)
    phases = task.request.phases or None
    rows = replay(task.trace, cohorts, [route], task.request.cluster, phases=phases, ports=True)
    pipelines = [_pipeline(task, tally, speeds) for (tally,) in rows]
    task.say("solving pipemoe")
    started, max_degree = time.perf_counter(), task.request.max_degree or TUTEL_MAX_DEGREE
    table = tabulated(pipelines[0], max_degree, joint=task.request.joint)
    degrees = table.degrees(str(task.method))
    outcome = _outcome(table, degrees, started)
    baselines = {name: table.degrees(name) for name in rivals(task.method)}
    task.say("timing the plan and its baselines")
    contenders = {"plan": degrees, **baselines}
    timed = [[_replayed(name, found, one) for name, found in contenders.items()] for one in pipelines]
    return Solved(
        decision=degrees,
        options=_options(task, pipelines[0], table, degrees, baselines),
        outcome=outcome,
        evaluated=judge(cohorts, timed, task.trace.model, speeds, seed=task.request.seed),
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
    for part, curve in (("dispatch", task.speeds.exchange), ("experts", task.speeds.experts)):
        if curve is None:
            raise InputError(
                f"{task.request.profile}: no seconds of {part}, which pipemoe needs: {task.speeds.missing[part]}"
            )
    return task.speeds


def _pipeline(task: Task, tally: Tally, speeds: Speeds) -> Pipeline:
    if not tally.loads.any():
        raise InputError(f"{task.trace.path}: no token is routed in the fitted, or in the held-out, steps")
    factor = BACKWARD if task.surveyed.training else 0.0
    return Pipeline(tally, speeds, task.request.cluster, task.trace.model, factor, task.request.full_duplex)


def _replayed(name: str, degrees: PipelineDecision, pipeline: Pipeline) -> Replayed:
    return Replayed(name, "standard", pipeline.tally, pipeline.predicted(degrees))


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


def _options(
    task: Task,
    pipeline: Pipeline,
    table: DegreeTable,
    degrees: PipelineDecision,
    baselines: dict[str, PipelineDecision],
) -> PipelineOptions:
    backward = degrees.backward
    return PipelineOptions(
        method=str(task.method),
        max_degree=len(table.forward),
        joint=table.joint,
        full_duplex=table.full_duplex,
        backward=table.factor,
        placement="contiguous" if task.base is None else "base",
        baselines=baselines,
        a2a_ffn_overlap_degree=table.tutel,
        whole=_stages(pipeline, (1,) * len(degrees.forward), 1.0),
        forward=_stages(pipeline, degrees.forward, 1.0),
        backward_pass=None if backward is None else _stages(pipeline, backward, table.factor),
    )


def _stages(pipeline: Pipeline, degrees: tuple[int, ...], factor: float) -> StageSeconds:
    """What the stages of one chunk take on the fitted steps, mean over steps."""
    dispatch, experts, combine = (one.seconds.mean(axis=0) for one in pipeline.chunk(np.array(degrees)).stages)
    return StageSeconds(dispatch_s=dispatch.tolist(), experts_s=(factor * experts).tolist(), combine_s=combine.tolist())
