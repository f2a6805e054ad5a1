"""Recheck of a pipemoe plan: every degree timed again on what the naive replay counts.

Legend: S scenarios; P pairs of degrees; L MoE layers; B steps; D devices; E experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ....errors import CertificationError, InputError, UsageError
from ....runtime.decisions import PipelineDecision
from ....runtime.plan import Plan
from ....traces.count_form import CountTable
from ...certify.census import Source
from ...certify.recounted import Recounted
from ...evaluate.chunks import Cut, Cuts
from ...evaluate.journey import Journey
from ...evaluate.pipelined import Pipeline
from ...evaluate.price import pipeline_of
from ...options import PipelineOptions, StageSeconds, parsed
from ..check import Again, Check, Told
from .degrees import DegreeTable, tabulated
from .params import MAX_DEGREE
from .strategy import BASELINES, stages

__all__ = ["recheck"]

TOLERANCE = 1e-9


def recheck(plan: Plan, again: Again | None) -> Iterator[Check | Told]:
    """As `Strategy.recheck`."""
    options, decision = parsed(PipelineOptions, dict(plan.options.get("pipeline", {})), "pipeline"), _decided(plan)
    _check_shape(plan, options, decision)
    if again is None or "pipeline" not in plan.outcome:
        return
    if again.evaluated is not None and decision.capacity_factor is not None:
        yield from _dropped(plan, again.task, options, decision)
    costs = again.task.costs
    if costs is None:
        yield Told("degrees, their objective and their bound", checked=False)
        return
    task, passes = again.task, again.task.scene.passes
    if passes is None or (passes.backward, passes.full_duplex) != (options.backward, options.full_duplex):
        raise CertificationError(f"passes of backward factor {options.backward}; the trace gives {passes}")
    scene = replace(task.scene, cohorts=task.scene.cohorts[:1])
    ((tally,),) = task.replay(scene, [Journey(task.dispatch_model, task.placement)], ports=True)
    pipeline = pipeline_of(tally, scene, passes, decision.capacity_factor)
    table = tabulated(pipeline, options.max_degree, joint=options.joint)
    yield from _outcome(plan, options, pipeline, table)
    for name, claimed in options.baselines.items():
        yield Check(f"degrees of {name}, others take fewer seconds:", claimed, table.degrees(name))
    yield Check("a2a_ffn_overlap_degree: others take fewer seconds:", options.a2a_ffn_overlap_degree, table.tutel)
    yield Told("degrees", checked=True)
    yield from _stage_checks(options, pipeline, Cuts.of(decision))
    timing = {source.removeprefix("link ") for source in costs.sources.values()}
    for kind in sorted({*plan.cluster.links} - timing):
        yield Told(f"link {kind}, which times nothing", checked=False)
    if options.method == "paper":
        yield Told("that the degrees of paper are those of its algorithm", checked=False)
    if decision.shares is not None:
        yield Told("that no other shares of chunks take fewer seconds", checked=False)


def _decided(plan: Plan) -> PipelineDecision:
    assert plan.decisions.pipeline is not None
    return plan.decisions.pipeline


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
    degrees = options.a2a_ffn_overlap_degree
    if len(degrees) != plan.model.num_layers:
        raise CertificationError("a2a_ffn_overlap_degree: not one a layer")
    if options.placement != ("contiguous" if plan.decisions.placement is None else "base"):
        raise CertificationError(f"degrees under placement {options.placement!r}, which is not the plan's")
    experts, slots = plan.model.num_experts, None if plan.placement is None else plan.placement.slots
    alike = experts % plan.cluster.num_devices == 0 and (slots is None or {*slots.tolist()} == {experts // len(slots)})
    if decision.capacity_factor is not None and not alike:
        raise CertificationError("a fixed capacity without every expert once and as many on every device")


def _outcome(plan: Plan, options: PipelineOptions, pipeline: Pipeline, table: DegreeTable) -> Iterator[Check | Told]:
    """The objective is what the plan takes; the bound, of equal chunks, the least that any degrees take."""
    outcome, decision = plan.outcome["pipeline"], _decided(plan)
    goal = (outcome.objective.name, outcome.objective.sense, outcome.bound_kind)
    if goal != ("moe_s", "min", "full search" if decision.shares is None else None):
        raise CertificationError(f"objective and bound {goal}; expected the least moe_s by a full search")
    taken_PL = table.taken[len(table.taken) // 2]
    least = float(taken_PL.min(axis=0).sum())
    found = float(pipeline.both(Cuts.of(decision)).sum())
    yield Check("objective", outcome.objective.value, found)
    yield Told("objective of pipeline", checked=True)
    if options.method in ("exact", "unequal") and found > least * (1 + TOLERANCE):
        raise CertificationError(f"degrees of plan: others take fewer seconds, {least:.9g}")
    if decision.shares is None:
        yield Check("bound", outcome.bound, least)
        yield Told("bound of pipeline", checked=True)
    if options.method == "robust":
        _check_regret(table, decision)


def _check_regret(table: DegreeTable, decision: PipelineDecision) -> None:
    """No degrees have a smaller largest regret."""
    places = [tuple(pair) for pair in table.pairs.tolist()]
    pairs = zip(decision.forward, decision.backward or decision.forward, strict=True)
    for layer, pair in enumerate(pairs):
        taken_SP = table.taken[:, :, layer]
        worst_P = (taken_SP - taken_SP.min(axis=1, keepdims=True)).max(axis=0)
        if worst_P[places.index(pair)] > worst_P.min() + TOLERANCE * taken_SP.min(axis=1).max():
            raise CertificationError(f"robust degrees of layer {layer}: others have a smaller largest regret")


def _stage_checks(options: PipelineOptions, pipeline: Pipeline, cuts: Cuts) -> Iterator[Check]:
    """The stages of the chunks, which a timeline draws."""
    whole = Cut.equal(1, pipeline.model.num_layers)
    passes = ((options.whole, whole, 1.0), (options.forward, cuts.forward, 1.0))
    for claimed, cut, factor in (*passes, (options.backward_pass, cuts.backward, pipeline.backward)):
        if (claimed is None) != (cut is None):
            raise CertificationError("options.pipeline: stages of a pass that the plan does not decide")
        if claimed is not None and cut is not None:
            yield from _columns(claimed, stages(pipeline, cut, factor))


def _columns(claimed: StageSeconds, found: StageSeconds) -> Iterator[Check]:
    for (name, ours), (_, theirs) in zip(claimed, found, strict=True):
        if [*map(len, ours)] != [*map(len, theirs)]:
            raise CertificationError(f"options.pipeline: {name} of other chunks than the plan's")
        for layer, column in enumerate(ours):
            for chunk, figure in enumerate(column):
                yield Check(f"{name} of chunk {chunk} of layer {layer}", figure, theirs[layer][chunk])


def _dropped(plan: Plan, task: Recounted, options: PipelineOptions, decision: PipelineDecision) -> Iterator[Check]:
    """Recheck of the pairs that every contender drops."""
    assert plan.evaluation is not None
    census = task.replay.census(Source.of(task.scene))
    parts = [part for part in (plan.evaluation.fit, plan.evaluation.held_out) if part is not None]
    shape = (plan.model.num_layers, plan.cluster.num_devices, plan.model.num_experts)
    for roster, part in zip(census.rosters, parts, strict=True):
        wanted = np.zeros((roster.num_steps, *shape), np.int64)
        held_BD = np.zeros((roster.num_steps, shape[1]), np.int64)
        for batch, unit_R, place_R in census.rows():
            rows = roster.rows(batch, unit_R, place_R)
            assert not isinstance(batch, CountTable)
            at = np.flatnonzero(rows.step >= 0)
            np.add.at(held_BD, (rows.step[at], rows.home[at]), 1)
            for layer in range(shape[0]):
                ids_RK = batch.ids[rows.number[at], layer]
                row, choice = np.nonzero(ids_RK < shape[2])
                np.add.at(wanted[:, layer], (rows.step[at][row], rows.home[at][row], ids_RK[row, choice]), 1)
        rows_B = plan.model.top_k * np.floor(decision.capacity_factor * np.ceil(held_BD.max(axis=1) / shape[2]))
        for one in part.contenders:
            cut = _cut_of(one.name, decision, options.baselines, shape[0])
            pieces_L = cut.degree * cut.calls
            room_BL = np.ceil(rows_B[:, None] / pieces_L) * pieces_L
            fixed = one.name == "plan" or one.name in options.baselines
            share = float(np.maximum(wanted - room_BL[:, :, None, None], 0).sum() / wanted.sum()) if fixed else None
            metric = one.metrics.get("dropped_share")
            yield Check(f"{one.label}: dropped_share", None if metric is None else metric.value, share)


def _cut_of(name: str, decision: PipelineDecision, baselines: Mapping[str, PipelineDecision], num_layers: int) -> Cut:
    one = decision if name == "plan" else baselines.get(name)
    return Cut.equal(1, num_layers) if one is None else Cuts.of(one).forward
