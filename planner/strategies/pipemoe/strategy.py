"""PipeMoE: how deep to pipeline each MoE layer under a placement (solvers/pipemoe)."""

import time
from collections.abc import Sequence
from typing import ClassVar

from ....errors import InputError, UsageError
from ....runtime.decisions import DispatchModel, PipelineDecision
from ....runtime.plan import Plan
from ....solvers.outcome import ROUNDING, Objective, Outcome, Status
from ....solvers.pipemoe import TUTEL_MAX_DEGREE
from ...evaluate.chunks import Cuts, Pipeline, capacity
from ...evaluate.journey import Contender, Journey
from ...evaluate.price import STEP
from ...evaluate.scene import BACKWARD, Passes, Scene
from ...evaluate.tally import Tally
from ...options import MAX_SECONDS, PipelineOptions
from ...task import Task
from ..strategy import Solution, Strategy
from . import PipemoeParams, timeline
from .degrees import BASELINES, DegreeTable, stages_of, tabulated, unequal
from .recheck import recheck
from .sections import remarks, sections


class Pipemoe(Strategy):
    """Exchanges and experts overlap, layer by layer in the chunks that take the fewest seconds."""

    name = "pipemoe"
    decides = "pipeline"
    beside = frozenset({"placement"})
    by_steps = True
    shifts_load = False
    uses = frozenset({"prefill", "training"})
    objectives: ClassVar = {"moe_s": ("MoE layers take, per step,", "s")}
    timeline: ClassVar = timeline
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)
    pictures = staticmethod(timeline.pictures)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Seconds, all that degrees change."""
        return STEP

    def passes(self, task: Task) -> Passes:
        """Forward, and backward in training."""
        backward = BACKWARD if task.use == "training" else 0.0
        return Passes(backward, PipemoeParams.of(task.params).full_duplex)

    def solve(self, task: Task) -> Solution:
        """Choose the degrees of every layer by the busiest device and port of the fitted steps."""
        trace, params = task.trace, PipemoeParams.of(task.params)
        _check_costs(task)
        task.say("replaying the trace under the placement")
        journey = Journey(task.dispatch_model, task.placement)
        tallies = task.replay(task.scene, [journey], ports=True)
        pipeline, *_ = [_pipeline(task, tally, trace.path) for (tally,) in tallies]  # those held out are checked, too
        task.say("solving pipemoe")
        started = time.perf_counter()
        table = tabulated(pipeline, params.max_degree or TUTEL_MAX_DEGREE, joint=params.joint)
        if not (longest := table.passes_s.max()) <= MAX_SECONDS:
            raise InputError(
                f"an MoE layer takes {longest:.3g} s by the profile and the links; expected at most {MAX_SECONDS:g}:"
                " measure again, or correct --link"
            )
        decision = unequal(pipeline, table) if params.method == "unequal" else table.degrees(params.method)
        baselines = () if task.inner else BASELINES  # a candidate is held against today alone
        options = PipelineOptions(
            method=params.method,
            max_degree=table.max_degree,
            joint=params.joint,
            full_duplex=pipeline.passes.full_duplex,
            backward=pipeline.passes.backward,
            placement="contiguous" if task.base is None else "base",
            baselines={name: table.degrees(name) for name in baselines if name != params.method},
            a2a_ffn_overlap_degree=table.tutel,
            agreement_s=pipeline.agreement_s,
            **stages_of(pipeline, Cuts.of(decision)),
        )
        return Solution(decision, options, _outcome(pipeline, table, decision, started))

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """Rivals: this placement at other degrees."""
        own, baselines = Contender("plan", journey), PipelineOptions.of(plan).baselines
        return [own.named(name, cuts=Cuts.of(decision)) for name, decision in baselines.items()]


def _check_costs(task: Task) -> None:
    """Refuse to go without curves of exchanges and experts, and say what lacks."""
    costs = None if task.request.profile is None else task.scene.costs
    if costs is None:
        raise UsageError(
            "no profile: pipemoe weighs the seconds of exchanges against those of experts; run moeplan profile, or name"
            " one with --profile"
        )
    curves = {"dispatch": costs.exchange, "experts": costs.experts}
    lacking = [part for part, curve in curves.items() if curve is None]
    if none := [f"none of {part}: {costs.missing[part]}" for part in lacking]:
        raise InputError(
            f"{task.request.profile}: pipemoe needs the seconds of dispatch and experts; there are"
            f" {'; and '.join(none)}"
        )


def _pipeline(task: Task, tally: Tally, path: object) -> Pipeline:
    factor, model, passes = PipemoeParams.of(task.params).capacity_factor, task.model, task.scene.passes
    assert passes is not None
    if not tally.loads.any():
        raise InputError(f"{path}: no token is routed in the fitted, or in the held-out, steps")
    if factor is not None and (tally.slots != model.num_experts / len(tally.slots)).any():
        raise UsageError(
            f"--capacity-factor with {tally.slots.sum()} slots for {model.num_experts} experts; a fixed capacity needs"
            " every expert once and as many on every device"
        )
    if factor is not None and not capacity(tally, model, factor)[tally.loads.any(axis=2)].all():
        raise UsageError(
            f"--capacity-factor {factor}: a buffer of int({factor:g} ceil(tokens / experts)) rows holds none in some"
            " step; expected a larger one, 1 is enough in every step"
        )
    return Pipeline(tally, task.scene, passes, task.dispatch_model, factor, task.wire)


def _outcome(pipeline: Pipeline, table: DegreeTable, degrees: PipelineDecision, started: float) -> Outcome:
    """Outcome of the degrees beside the best there are, which a search of all of them finds.

    Nothing bounds unequal chunks: other shares, under curves of any form, may take fewer seconds.
    """
    if degrees.shares is not None:
        objective = Objective("moe_s", float(pipeline.both(Cuts.of(degrees)).sum()), "min")
        return Outcome.of(status=Status.FEASIBLE, objective=objective, started=started, backend="scipy highs")
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


STRATEGY = Pipemoe()
