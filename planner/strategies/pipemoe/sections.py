"""Screen and page of a pipemoe plan: its degrees, the most that overlap can hide, drops under a fixed capacity."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ....errors import InputError
from ....runtime.plan import Part, Plan
from ....solvers.arrays import Floats
from ....solvers.pipemoe import TUTEL_MAX_DEGREE
from ....solvers.pipemoe.seconds import chunk_seconds
from ...document import Section, Text
from ...evaluate.metrics import COMBINE, DISPATCH, DROPPED, EXPERTS
from ...figures import TimeUnit, contender_of, figure_of, percent
from ...options import PipelineOptions, StageSeconds

LEAST_CURVE_SHARE = 0.01  # of a gain, from which its curve is named


def pipeline_options(plan: Plan) -> PipelineOptions:
    """Record of how the plan's degrees were decided; InputError where it decides none, or does not say how."""
    if plan.decisions.pipeline is None:
        raise InputError("the plan decides no pipeline; solve one with moeplan solve --strategy pipemoe")
    options, degrees, whole = PipelineOptions.of(plan), plan.decisions.pipeline, (1,) * plan.model.num_layers
    back = degrees.backward or whole
    cuts = ((options.whole, whole), (options.forward, degrees.forward), (options.backward_pass, back))
    for counts, column in ((counts, column) for stages, counts in cuts for _, column in stages or ()):
        widths = tuple(map(len, column))
        if len(widths) != len(counts) or any(width not in (1, n) for width, n in zip(widths, counts, strict=True)):
            raise InputError(f"options.pipeline: stages of other than the chunks of {len(whole)} layers; re-run solve")
    return options


def degree_choices(options: PipelineOptions) -> str:
    """Limits of the choice of degrees, and the channels assumed, in words."""
    words = [
        f"up to {options.max_degree}",
        "dispatch and combine together" if options.full_duplex else "dispatch and combine in turn",
    ]
    if options.joint:
        words.append("one for both passes" if options.backward else "--joint without effect: no backward pass")
    return ", ".join(words)


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The degree of every layer in each pass, and what Tutel takes."""
    options, pipeline = pipeline_options(plan), plan.decisions.pipeline
    assert pipeline is not None
    most = min(TUTEL_MAX_DEGREE, options.max_degree)
    lines = [f"layer by layer; tutel: a2a_ffn_overlap_degree, one for both passes, at most {most}"]
    tutel = options.a2a_ffn_overlap_degree
    for name, degrees in (("forward", pipeline.forward), ("backward", pipeline.backward), ("tutel", tutel)):
        text = " ".join(map(str, degrees or ()))
        lines += textwrap.wrap(text, max(width, 28), initial_indent=f"{name:<12}", subsequent_indent=" " * 12)
    yield Section("Pipeline degrees", (Text(tuple(lines)),), verbose=True)


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Remarks on the most that overlap could save, and on limits of the figures.

    Notes
    -----
    Exchanges share one channel and experts one device, so a pass in any chunks takes at least the longer of both; in
    one piece it takes both: overlap saves at most the shorter. With full duplex each exchange has a channel of its own,
    and overlap saves at most all but the longest of the three.
    """
    options, decision, whole = pipeline_options(plan), plan.decisions.pipeline, contender_of(part, "degree_1/standard")
    assert decision is not None
    if {*decision.forward, *(decision.backward or ())} == {1}:
        yield "one piece is best in every layer: chunks cost more start-up time than overlap hides"
    backward = "" if decision.backward is None else f"; backward {_tallied(decision.backward)}"
    yield f"chunks per layer: forward {_tallied(decision.forward)}{backward} ({degree_choices(options)})"
    dispatch, experts, combine = (figure_of(whole, name) for name in (DISPATCH, EXPERTS, COMBINE))
    busy = {"exchanges": dispatch + combine, "experts": experts}
    if options.full_duplex:
        busy = {"dispatch": dispatch, "experts": experts, "combine": combine}
    hidden = sum(busy.values()) - max(busy.values())
    yield (
        f"overlap can hide at most {TimeUnit.worded(hidden)} of a forward pass:"
        f" {', '.join(f'{name} {TimeUnit.worded(seconds)}' for name, seconds in busy.items())}"
    )
    saved, bent = _curve_gain(plan, options)
    if bent > LEAST_CURVE_SHARE * saved > 0:
        yield (
            f"of {TimeUnit.worded(saved)} that chunks save on the fitted steps, {TimeUnit.worded(bent)} are no overlap:"
            " the experts' curve says that chunks compute faster than the whole"
        )
    if decision.shares is not None:
        passes = [*decision.shares.forward, *(decision.shares.backward or ())]
        uneven = sum(len(set(shares)) > 1 for shares in passes)
        yield (
            f"chunks are unequal in {uneven} of {len(passes)} passes of layers, where that is faster; no engine that is"
            " exported to takes them"
            if uneven
            else f"none of {len(passes)} passes of layers is faster in unequal chunks"
        )
    if decision.capacity_factor is not None:
        if (dropped := part.contenders[0].metrics.get(DROPPED)) is not None:
            yield f"{percent(dropped.value, 1)} of the token-expert pairs are dropped"
        yield (
            f"capacity: every expert's buffer holds {decision.capacity_factor:g} times the mean, padded to a"
            " multiple of both degrees; what dropped pairs do to outputs no figure here weighs"
        )
    if options.backward:
        yield "training: forward and backward of the MoE layers are timed, of attention forward only"


def _tallied(degrees: Sequence[int]) -> str:
    layers = sorted(Counter(degrees).items())
    if len(layers) == 1:
        return f"{degrees[0]} in every layer"
    return ", ".join(f"{degree} in {number} layer{'s' * (number > 1)}" for degree, number in layers)


def _curve_gain(plan: Plan, options: PipelineOptions) -> tuple[float, float]:
    """Seconds that chunks save over one piece, and those of them that are lost if none is faster than its part of it.

    Work cut into pieces takes no less on a device; a fitted curve may say so where it bends upwards or steps.

    Notes
    -----
    By the means over the fitted steps that the plan holds, layer by layer and pass by pass, with s_i the share of a
    layer in chunk i,

        t_e(i) = max( curve(i), s_i curve(whole) )                                                              (1)

    where curve(i) is of all calls of the chunk's experts.
    """
    saved_s = lost_s = 0.0
    for layer in range(plan.model.num_layers):
        for one in layer_passes(plan, options, layer):
            first_C, experts_C, last_C = one.chunks
            chunked_s, honest_s = (
                float(chunk_seconds(first_C, busy_C, last_C, full_duplex=options.full_duplex))
                for busy_C in (experts_C, np.maximum(experts_C, one.shares * one.whole[1]))  # (1)
            )
            saved_s += float(np.sum(one.whole)) - chunked_s
            lost_s += honest_s - chunked_s
    return saved_s, lost_s


class LayerPass(NamedTuple):
    """A pass of a layer: the shares of its chunks `[C]`, and the seconds of its stages, whole `[1]` and in chunks."""

    name: str
    shares: Floats
    whole: list[Floats]
    chunks: list[Floats]


def layer_passes(plan: Plan, options: PipelineOptions, layer: int) -> Iterator[LayerPass]:
    """The passes of a layer that the plan decides, forward first."""
    decision = plan.decisions.pipeline
    assert decision is not None
    passes = ("forward", options.forward, None), ("backward", options.backward_pass, options.backward)
    for name, stages, slower in passes:
        degrees, shares = getattr(decision, name), getattr(decision.shares, name, None)
        if degrees is None or stages is None:
            continue
        degree = degrees[layer]
        share_C = np.full(degree, 1 / degree) if shares is None else np.array(shares[layer])
        whole = stage_seconds(options.whole, layer, 1, backward=slower)
        kept = None if slower is None else 1.0  # seconds of its chunks are backward ones already
        chunks = stage_seconds(stages, layer, degree, backward=kept)
        if slower is None:  # a forward pass begins with the agreement on counts
            for dispatch_C, *_ in (whole, chunks):
                dispatch_C[0] += options.agreement_s
        yield LayerPass(name, share_C, whole, chunks)


def stage_seconds(stages: StageSeconds, layer: int, degree: int, *, backward: float | None) -> list[Floats]:
    """Seconds of a layer's chunks in each stage of a pass, one after the other, `[C]` each.

    In a backward pass the experts take `backward` times as long; None: a forward pass.
    """
    dispatch, experts, combine = (np.resize(np.array(column[layer]), degree) for _, column in stages)
    return [dispatch, experts, combine] if backward is None else [combine, backward * experts, dispatch]
