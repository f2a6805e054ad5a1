"""Recheck of a pipemoe plan: every degree timed again, pair by pair, on what the naive replay counts.

Legend: S scenarios (the exchanges' curves at each level with the experts' at each); L MoE layers.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ....errors import CertificationError, InputError, UsageError
from ....runtime.decisions import PipelineDecision
from ....runtime.plan import Plan
from ....solvers.pipemoe import TUTEL_MAX_DEGREE
from ...evaluate.chunks import Cut, Cuts
from ...evaluate.journey import Journey
from ...evaluate.pipelined import Pipeline
from ...evaluate.price import pipeline_of
from ...options import PipelineOptions, StageSeconds, parsed
from ..registry import MAX_DEGREE
from ..strategy import Again, Check, Told
from .strategy import BASELINES, stages

__all__ = ["recheck"]

TOLERANCE = 1e-9
Pair = tuple[int, int]  # forward and backward degree
Seconds = NDArray[np.float64]


def recheck(plan: Plan, again: Again | None) -> Iterator[Check | Told]:
    """As `Strategy.recheck`."""
    options, decision = parsed(PipelineOptions, dict(plan.options.get("pipeline", {})), "pipeline"), _decided(plan)
    _check_shape(plan, options, decision)
    if again is None or "pipeline" not in plan.outcome:
        return
    yield Told("that max_degree, joint and full_duplex are what was asked for", checked=False)
    costs, scene = again.task.costs, again.task.scene
    if costs is None:
        yield Told("degrees, their objective and their bound", checked=False)
        return
    passes = scene.passes
    if passes is None or (passes.backward, passes.full_duplex) != (options.backward, options.full_duplex):
        raise CertificationError(f"passes of backward factor {options.backward}; the trace gives {passes}")
    journey = Journey(again.task.dispatch_model, again.task.placement)
    ((tally,),) = again.task.replay(replace(scene, cohorts=scene.cohorts[:1]), [journey], ports=True)
    pipeline = pipeline_of(tally, scene, passes, decision.capacity_factor)
    taken = _taken(pipeline, options)
    yield from _outcome(plan, options, pipeline, taken)
    _check_baselines(options, taken)
    yield Told("degrees", checked=True)
    yield from _stage_checks(options, pipeline, Cuts.of(decision))
    timing = {source.removeprefix("link ") for source in costs.sources.values()}
    for kind in sorted({*plan.cluster.links} - timing):
        yield Told(f"link {kind}: no figure depends on it", checked=False)
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


def _pairs(decision: PipelineDecision) -> list[Pair]:
    """The degrees of every layer; without a backward pass twice the forward one."""
    return [*zip(decision.forward, decision.backward or decision.forward, strict=True)]


def _taken(pipeline: Pipeline, options: PipelineOptions) -> dict[Pair, Seconds]:
    """Seconds of all passes of every layer, mean over steps, `[S, L]`, at each pair of degrees that may be chosen.

    One degree divides the other. The experts of a chunk are called once for each piece that both passes make.
    """
    num_layers, trains = pipeline.model.num_layers, bool(options.backward)

    @cache
    def one_pass(degree: int, pieces: int, back: bool) -> Seconds:
        chunks = pipeline.chunks(Cut.equal(degree, num_layers, pieces // degree))
        return pipeline.taken(chunks, back=back)

    degrees, alone, found = range(1, options.max_degree + 1), options.joint or not trains, dict[Pair, Seconds]()
    for forward, backward in zip(degrees, degrees, strict=True) if alone else product(degrees, degrees):
        pieces = max(forward, backward)
        if pieces % min(forward, backward) == 0:
            found[forward, backward] = one_pass(forward, pieces, False)
            if trains:
                found[forward, backward] = found[forward, backward] + one_pass(backward, pieces, True)
    return found


def _outcome(
    plan: Plan, options: PipelineOptions, pipeline: Pipeline, taken: dict[Pair, Seconds]
) -> Iterator[Check | Told]:
    """The objective is what the plan takes; the bound, of equal chunks, the least that any degrees take."""
    outcome, decision = plan.outcome["pipeline"], _decided(plan)
    goal = (outcome.objective.name, outcome.objective.sense, outcome.bound_kind)
    if goal != ("moe_s", "min", "full search" if decision.shares is None else None):
        raise CertificationError(f"objective and bound {goal}; expected the least moe_s by a full search")
    least = float(_least(taken).sum())
    found = float(pipeline.both(Cuts.of(decision)).sum())
    yield Check("objective", outcome.objective.value, found)
    yield Told("objective of pipeline", checked=True)
    if options.method in ("exact", "unequal") and found > least * (1 + TOLERANCE):
        raise CertificationError(f"degrees of plan: others take fewer seconds, {least:.9g}")
    if decision.shares is None:
        yield Check("bound", outcome.bound, least)
        yield Told("bound of pipeline", checked=True)
    if options.method == "robust":
        _check_regret(taken, decision)


def _least(taken: dict[Pair, Seconds], most: int = MAX_DEGREE, *, alike: bool = False) -> Seconds:
    """The fewest seconds of every layer under the curves themselves, `[L]`, by degrees of at most so many chunks."""
    chosen = [seconds for pair, seconds in taken.items() if max(pair) <= most and (pair[0] == pair[1] or not alike)]
    return np.asarray(np.min([_middle(one) for one in chosen], axis=0))


def _middle(seconds: Seconds) -> Seconds:
    """Seconds under the curves themselves, between the low and the high ones."""
    return np.asarray(seconds[len(seconds) // 2])


def _check_regret(taken: dict[Pair, Seconds], decision: PipelineDecision) -> None:
    """No degrees have a smaller largest regret."""
    least_SL = np.min([*taken.values()], axis=0)
    worst = {pair: (seconds - least_SL).max(axis=0) for pair, seconds in taken.items()}
    smallest_L = np.min([*worst.values()], axis=0) + TOLERANCE * least_SL.max(axis=0)
    for layer, pair in enumerate(_pairs(decision)):
        if worst[pair][layer] > smallest_L[layer]:
            raise CertificationError(f"robust degrees of layer {layer}: others have a smaller largest regret")


def _check_baselines(options: PipelineOptions, taken: dict[Pair, Seconds]) -> None:
    """Equal degrees that take the fewest seconds, one for all layers, and the best that Tutel takes."""
    seconds = {
        name: sum(_middle(taken[pair])[layer] for layer, pair in enumerate(_pairs(one)))
        for name, one in options.baselines.items()
    }
    alike = {pair: float(_middle(taken[pair]).sum()) for pair in taken if pair[0] == pair[1]}
    least = {"degree_1": alike[1, 1], "one_degree": min(alike.values()), "exact": float(_least(taken).sum())}
    for name in least.keys() & seconds.keys():
        one_for_all = name == "exact" or len({*_pairs(options.baselines[name])}) == 1
        if not one_for_all or seconds[name] > least[name] * (1 + TOLERANCE):
            raise CertificationError(f"degrees of {name}, others take fewer seconds: {least[name]:.9g}")
    tutel_L = _least(taken, TUTEL_MAX_DEGREE, alike=True)
    for layer, degree in enumerate(options.a2a_ffn_overlap_degree):
        within = degree <= min(TUTEL_MAX_DEGREE, options.max_degree)
        if not within or _middle(taken[degree, degree])[layer] > tutel_L[layer] * (1 + TOLERANCE):
            raise CertificationError(f"a2a_ffn_overlap_degree: others take fewer seconds: layer {layer}, {degree}")


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
