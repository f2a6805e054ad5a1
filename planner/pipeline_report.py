"""What `solve` and `show` print of a plan's pipeline degrees."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import ValidationError

from ..errors import InputError
from ..runtime.plan import Part, Plan
from .options import PipelineOptions
from .part import find, value
from .seconds_report import TimeUnit

__all__ = ["degree_lines", "degree_summary", "pipeline_options", "pipeline_remarks"]


def pipeline_options(plan: Plan) -> PipelineOptions:
    """How the plan's degrees were decided.

    Raises
    ------
    InputError
        The plan decides none, or does not say how.
    """
    if plan.decisions.pipeline is None:
        raise InputError("the plan decides no pipeline; solve one with moeplan solve --strategy pipemoe")
    try:
        found = PipelineOptions.model_validate(dict(plan.options.get("pipeline", {})))
    except ValidationError as error:
        raise InputError(f"options.pipeline: {error.error_count()} values missing or wrong; re-run solve") from error
    degrees, num_layers = plan.decisions.pipeline, plan.model.num_layers
    whole = (1,) * num_layers
    cuts = ((found.whole, whole), (found.forward, degrees.forward), (found.backward_pass, degrees.backward or whole))
    for stages, counts in cuts:
        for _, column in stages or ():
            if len(column) != num_layers or any(
                len(one) not in (1, count) for one, count in zip(column, counts, strict=True)
            ):
                raise InputError(
                    f"options.pipeline: stages of other than the chunks of {num_layers} layers; re-run solve"
                )
    return found


def degree_summary(plan: Plan) -> str:
    """How many layers have which degree in each pass."""
    pipeline = plan.decisions.pipeline
    assert pipeline is not None
    words = f"forward {_tallied(pipeline.forward)}"
    return words if pipeline.backward is None else f"{words}; backward {_tallied(pipeline.backward)}"


def degree_lines(plan: Plan, width: int) -> Iterable[str]:
    """The degree of every layer in each pass, and what Tutel takes."""
    options, pipeline = pipeline_options(plan), plan.decisions.pipeline
    assert pipeline is not None
    rows = {"forward": pipeline.forward, "backward": pipeline.backward, "tutel": options.a2a_ffn_overlap_degree}
    yield ""
    yield "pipeline degrees, layer by layer; tutel: a2a_ffn_overlap_degree, one for both passes, at most 32"
    for name, degrees in rows.items():
        wrapped = textwrap.wrap(" ".join(map(str, degrees or ())), max(width - 12, 16))
        for number, line in enumerate(wrapped):
            yield f"{name if number == 0 else '':<10}  {line}"


def pipeline_remarks(plan: Plan, part: Part) -> Iterable[str]:
    """What overlap could save at most, and what the figures leave out.

    Notes
    -----
    Exchanges share one channel and experts one device, so a pass in any chunks takes at least the longer of both; in
    one piece it takes both: overlap saves at most the shorter. With full duplex the exchanges overlap each other, too.
    """
    options, whole = pipeline_options(plan), find(part, "degree_1/standard")
    exchanges = value(whole, "dispatch_s") + value(whole, "combine_s")
    experts = value(whole, "experts_s")
    unit = TimeUnit.of(part)
    if not options.full_duplex:
        yield (
            f"overlap can hide at most {unit.text(min(exchanges, experts))} {unit.name} of a forward pass: exchanges"
            f" {unit.text(exchanges)}, experts {unit.text(experts)}"
        )
    if options.shares is not None:
        passes = [options.shares.forward, options.shares.backward or ()]
        uneven = sum(len(set(shares)) > 1 for one in passes for shares in one)
        yield (
            f"chunks are unequal in {uneven} of {sum(map(len, passes))} passes of layers, where that is faster; no"
            " engine that is exported to takes them"
        )
    if options.capacity_factor is not None:
        yield (
            f"capacity: every expert's buffer holds {options.capacity_factor:g} times the mean, padded to whole chunks;"
            " tokens beyond it are dropped, which no figure here weighs"
        )
    if options.backward:
        yield "training: forward and backward of the MoE layers are timed, of attention forward only"


def _tallied(degrees: Sequence[int]) -> str:
    found = Counter(degrees)
    if len(found) == 1:
        return f"{degrees[0]} in every layer"
    return ", ".join(f"{degree} in {found[degree]}" for degree in sorted(found))
