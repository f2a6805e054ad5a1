"""The timeline of a pipelined layer: when each chunk is dispatched, computed and combined, as a picture of text.

Seconds are those of the plan: of one chunk in each stage, mean over the fitted steps, at the layer's degrees.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ....errors import UsageError
from ....runtime.plan import Plan
from ....solvers.pipemoe import simulate
from ....solvers.pipemoe.seconds import Event, Stage
from ...figures import TimeUnit
from ...options import StageSeconds
from .sections import degree_choices, pipeline_options

__all__ = ["BASIS", "SIGNS", "Timeline", "timeline_picture", "timelines"]

SIGNS = "0123456789"  # of the chunks, where they are few
SHADES = " ░▒▓█"  # of a column, by the share of it that is busy
BASIS = "means over the fitted steps"
LABEL = 14
SLACK = 1e-9  # of a column, that rounding may leave busy


@dataclass(frozen=True, slots=True)
class Timeline:
    """One pass of one layer.

    Parameters
    ----------
    name
        "forward" or "backward", or either "in one piece".
    whole_s
        The seconds of that pass in one piece.
    """

    name: str
    degree: int
    events: tuple[Event, ...]
    whole_s: float

    @property
    def seconds(self) -> float:
        """From the first dispatch to the last combine."""
        return self.events[-1].end_s

    @property
    def title(self) -> str:
        """The pass, its chunks, its seconds and what overlap saves of them."""
        if self.degree == 1:
            return f"{self.name}, {TimeUnit.worded(self.seconds)}"
        saved = 1 - self.seconds / self.whole_s if self.whole_s else 0.0
        return f"{self.name}, {self.degree} chunks, {TimeUnit.worded(self.seconds)}, {saved:.0%} less than in one piece"

    def lanes(self) -> Iterator[tuple[Stage, list[Event], float]]:
        """The events of every stage, and the share of the pass in which it is busy; else it is idle."""
        for stage in Stage:
            events = [event for event in self.events if event.stage is stage]
            busy_s = sum(event.end_s - event.start_s for event in events)
            yield stage, events, busy_s / self.seconds if self.seconds else 0.0


def timelines(plan: Plan, layer: int) -> list[Timeline]:
    """Each pass of the layer, in one piece, then in the plan's chunks where these are several.

    Raises
    ------
    InputError
        The plan decides no pipeline.
    UsageError
        There is no such layer.
    """
    options, pipeline = pipeline_options(plan), plan.decisions.pipeline
    assert pipeline is not None
    if not 0 <= layer < plan.model.num_layers:
        raise UsageError(f"--timeline {layer}; expected an MoE layer, 0 to {plan.model.num_layers - 1}")

    def run(degree: int, stages: StageSeconds, *, back: bool, slower: float = 1.0) -> tuple[Event, ...]:
        columns = (column[layer] for _, column in stages)
        dispatch, experts, combine = (one * degree if len(one) == 1 else one for one in columns)
        lasting = [slower * seconds for seconds in experts]
        chunks = (combine, lasting, dispatch) if back else (dispatch, lasting, combine)
        return simulate(*chunks, full_duplex=options.full_duplex)

    found: list[Timeline] = []
    for name, degrees, stages, back in (
        ("forward", pipeline.forward, options.forward, False),
        ("backward", pipeline.backward, options.backward_pass, True),
    ):
        if degrees is None or stages is None:
            continue
        whole = run(1, options.whole, back=back, slower=options.backward if back else 1.0)
        found.append(Timeline(f"{name} in one piece", 1, whole, whole[-1].end_s))
        if degrees[layer] > 1:
            found.append(Timeline(name, degrees[layer], run(degrees[layer], stages, back=back), whole[-1].end_s))
    return found


def timeline_picture(plan: Plan, layer: int, width: int) -> Iterable[str]:
    """A lane a stage, all passes on one scale: a sign a chunk, or shades where chunks are too many for signs."""
    passes = timelines(plan, layer)
    columns = max(width - LABEL - 1, 20)
    longest_s = max(found.seconds for found in passes)
    pictures = [_lanes(found, longest_s, columns) for found in passes]
    shaded = any({*SHADES[1:]} & {*lane} for lanes in pictures for lane in lanes)
    yield f"layer {layer}, {BASIS}; {degree_choices(plan)}"
    yield f"a column = {TimeUnit.worded(longest_s / columns)}, digit = chunk, % = share of the pass it is busy"
    if shaded:
        yield f"{SHADES[1:]} = share of a column that is busy, where chunks are too many for digits"
    for found, lanes in zip(passes, pictures, strict=True):
        yield ""
        yield found.title
        for (stage, _, busy), lane in zip(found.lanes(), lanes, strict=True):
            yield f"{stage.value:<{LABEL - 5}}{busy:>4.0%} |{lane}"


def _lanes(found: Timeline, longest_s: float, columns: int) -> list[str]:
    """The stages of a pass: by signs if every chunk that takes time can be seen, else by shades."""
    spans = [
        [tuple(_column(at, longest_s, columns) for at in (event.start_s, event.end_s)) for event in events]
        for _, events, _ in found.lanes()
    ]
    if found.degree <= len(SIGNS):
        lanes = [_signed(one, columns) for one in spans]
        if all(len({*lane} - {" "}) == found.degree for lane in lanes):
            return lanes
    return [_shaded(one, columns) for one in spans]


def _column(at_s: float, longest_s: float, columns: int) -> float:
    return at_s / longest_s * columns if longest_s else 0.0


def _signed(spans: Sequence[tuple[float, ...]], columns: int) -> str:
    """The chunks of a stage where they run; one that has the middle of no column takes a blank one near its own."""
    signs = [" "] * columns
    whole = [[round(at) for at in span] for span in spans]
    for sign, (first, last) in zip(SIGNS, whole, strict=False):
        signs[first:last] = sign * (last - first)
    for sign, (first, last) in zip(SIGNS, whole, strict=False):
        at = min(first, columns - 1)
        if first == last and signs[at] == " ":
            signs[at] = sign
    return "".join(signs).rstrip()


def _shaded(spans: Sequence[tuple[float, ...]], columns: int) -> str:
    """How much of each column a stage works, rounded up."""
    busy = [sum(max(min(last, at + 1) - max(first, at), 0.0) for first, last in spans) for at in range(columns)]
    return "".join(SHADES[min(math.ceil(share * 4 - SLACK), 4)] for share in busy).rstrip()
