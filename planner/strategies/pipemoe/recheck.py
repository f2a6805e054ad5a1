"""Recheck of a pipemoe plan: every degree timed again, pair by pair, on what the naive replay counts.

Legend: P pairs of degrees; R degrees; L MoE layers; S scenarios, as in `degrees`.
"""

from dataclasses import replace

from ....errors import CertificationError, InputError, UsageError
from ....runtime.decisions import PipelineDecision
from ....runtime.plan import Plan
from ....solvers.pipemoe import TUTEL_MAX_DEGREE
from ...certify.certificate import TOLERANCE, Certificate
from ...evaluate.chunks import Cuts, Pipeline
from ...evaluate.journey import Journey
from ...options import PipelineOptions
from ..strategy import Recheck
from . import MAX_DEGREE
from .degrees import BASELINES, DegreeTable, stages_of, tabulated


def recheck(plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
    """Recheck a plan as `Strategy.recheck` says."""
    options, decision = PipelineOptions.of(plan), plan.decisions.pipeline
    assert decision is not None
    _check_shape(plan, options, decision)
    if again is None or "pipeline" not in plan.outcome:
        return
    certificate.unchecked.append("that max_degree, joint and full_duplex are what was asked for")
    scene = again.task.scene
    if scene.costs is None:
        certificate.unchecked.append("degrees, their objective and their bound")
        return
    passes = scene.passes
    if passes is None or (passes.backward, passes.full_duplex) != (options.backward, options.full_duplex):
        raise CertificationError(f"passes of backward factor {options.backward}; the trace gives {passes}")
    journey = Journey(again.task.dispatch_model, again.task.placement)
    ((tally,),) = again.task.replay(replace(scene, cohorts=scene.cohorts[:1]), [journey], ports=True)
    pipeline = Pipeline(tally, scene, passes, again.task.dispatch_model, decision.capacity_factor, again.task.wire)
    table = tabulated(pipeline, options.max_degree, joint=options.joint)
    _check_outcome(plan, options, pipeline, table, certificate)
    _check_baselines(options, table)
    certificate.checked("degrees")
    _check_stages(options, pipeline, Cuts.of(decision), certificate)
    certificate.unchecked.append("that the degrees of paper are those of its algorithm")
    if decision.shares is not None:
        certificate.unchecked.append("that no other shares of chunks take fewer seconds")


def _check_shape(plan: Plan, options: PipelineOptions, decision: PipelineDecision) -> None:
    """Degrees as many as layers and no higher than allowed, passes as the options say, shares where they may be."""
    if options.max_degree > MAX_DEGREE:
        raise CertificationError(f"options.pipeline.max_degree: {options.max_degree}; expected at most {MAX_DEGREE:,}")
    if {*options.baselines} != {*BASELINES} - {options.method}:
        raise CertificationError(f"degrees of {sorted(options.baselines)}; the contenders are {', '.join(BASELINES)}")
    for name, one in {"plan": decision, **options.baselines}.items():
        passes = [one.forward, *([] if one.backward is None else [one.backward])]
        if any(len(degrees) != plan.model.num_layers or max(degrees) > options.max_degree for degrees in passes):
            raise CertificationError(f"degrees of {name}: not one a layer, or above {options.max_degree}")
        if (one.backward is None) != (options.backward == 0) or (
            options.joint and one.backward not in (None, one.forward)
        ):
            raise CertificationError(f"degrees of {name}: passes other than options.pipeline says")
        try:
            Cuts.of(one)
        except (InputError, UsageError) as error:
            raise CertificationError(f"degrees of {name}: {error}") from error
        uneven = name == "plan" and options.method == "unequal"
        if uneven and options.joint:
            raise CertificationError("degrees of plan: method unequal with joint, which is for equal chunks")
        if (one.shares is not None) != uneven or one.capacity_factor != decision.capacity_factor:
            raise CertificationError(f"degrees of {name}: shares or a capacity other than method {options.method} has")
    if len(options.a2a_ffn_overlap_degree) != plan.model.num_layers:
        raise CertificationError("a2a_ffn_overlap_degree: not one a layer")
    if options.placement != ("contiguous" if plan.decisions.placement is None else "base"):
        raise CertificationError(f"degrees under placement {options.placement!r}, which is not the plan's")
    experts, slots = plan.model.num_experts, None if plan.placement is None else plan.placement.slots
    alike = experts % plan.cluster.num_devices == 0 and (slots is None or {*slots.tolist()} == {experts // len(slots)})
    if decision.capacity_factor is not None and not alike:
        raise CertificationError("a fixed capacity without every expert once and as many on every device")


def _check_outcome(
    plan: Plan, options: PipelineOptions, pipeline: Pipeline, table: DegreeTable, certificate: Certificate
) -> None:
    """Recheck that the objective is what the plan takes, and the bound, of equal chunks, the least any degrees take."""
    outcome, decision = plan.outcome["pipeline"], plan.decisions.pipeline
    assert decision is not None
    goal = (outcome.objective.name, outcome.objective.sense, outcome.bound_kind)
    if goal != ("moe_s", "min", "full search" if decision.shares is None else None):
        raise CertificationError(f"objective and bound {goal}; expected the least moe_s by a full search")
    least = float(table.middle.min(axis=0).sum())
    reached = float(pipeline.both(Cuts.of(decision)).sum())
    certificate.agree("objective", outcome.objective.value, reached)
    certificate.checked("objective of pipeline")
    if options.method in ("exact", "unequal") and reached > least * (1 + TOLERANCE):
        raise CertificationError(f"degrees of plan: others take fewer seconds, {least:.9g}")
    if decision.shares is None:
        certificate.agree("bound", outcome.bound, least)
        certificate.checked("bound of pipeline")
    least_SL = table.passes_s.min(axis=1)
    worst_PL = (table.passes_s - least_SL[:, None]).max(axis=0)  # regret
    smallest_L = worst_PL.min(axis=0) + TOLERANCE * least_SL.max(axis=0)
    for layer, pair in enumerate(table.chosen(decision) if options.method == "robust" else ()):
        if worst_PL[pair, layer] > smallest_L[layer]:
            raise CertificationError(f"robust degrees of layer {layer}: others have a smaller largest regret")


def _check_baselines(options: PipelineOptions, table: DegreeTable) -> None:
    """Refuse baselines and Tutel's degrees where others of their kind take fewer seconds."""
    alike_RL, exact = table.middle[table.alike(table.max_degree)], table.middle.min(axis=0).sum()
    least = {"degree_1": alike_RL[0].sum(), "one_degree": alike_RL.sum(axis=1).min(), "exact": exact}
    for name in least.keys() & options.baselines.keys():
        baseline = options.baselines[name]
        one_for_all = name == "exact" or len({*table.chosen(baseline)}) == 1
        if not one_for_all or table.seconds(baseline) > least[name] * (1 + TOLERANCE):
            raise CertificationError(f"degrees of {name}, others take fewer seconds: {least[name]:.9g}")
    tutel_L = alike_RL[:TUTEL_MAX_DEGREE].min(axis=0)
    for layer, degree in enumerate(options.a2a_ffn_overlap_degree):
        within = degree <= min(TUTEL_MAX_DEGREE, options.max_degree)
        if not within or alike_RL[degree - 1, layer] > tutel_L[layer] * (1 + TOLERANCE):
            raise CertificationError(f"a2a_ffn_overlap_degree: others take fewer seconds: layer {layer}, {degree}")


def _check_stages(options: PipelineOptions, pipeline: Pipeline, cuts: Cuts, certificate: Certificate) -> None:
    """The agreement and the stages of the chunks, which a timeline draws."""
    certificate.agree("agreement", options.agreement_s, pipeline.agreement_s)
    for key, stages in stages_of(pipeline, cuts).items():
        claimed = getattr(options, key)
        if (claimed is None) != (stages is None):
            raise CertificationError("options.pipeline: stages of a pass that the plan does not decide")
        for (name, ours), (_, theirs) in zip(claimed or (), stages or (), strict=True):
            if [*map(len, ours)] != [*map(len, theirs)]:
                raise CertificationError(f"options.pipeline: {name} of other chunks than the plan's")
            for layer, columns in enumerate(zip(ours, theirs, strict=True)):
                for chunk, figures in enumerate(zip(*columns, strict=True)):
                    certificate.agree(f"{name} of chunk {chunk} of layer {layer}", *figures)
