"""The timeline of a pipelined layer: when each chunk is dispatched, computed and combined, as a picture of text.

Seconds are those of the plan: of one chunk in each stage, mean over the fitted steps, at the layer's degrees.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import UsageError
from ..runtime.plan import Plan
from ..solvers.pipemoe import simulate
from ..solvers.pipemoe.simulate import Event, Stage
from .options import StageSeconds
from .pipeline_report import pipeline_options

__all__ = ["Timeline", "human", "timeline_picture", "timelines"]

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"  # of the chunks
LABEL = 14


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
            return f"{self.name}, {human(self.seconds)}"
        saved = 1 - self.seconds / self.whole_s if self.whole_s else 0.0
        return f"{self.name}, {self.degree} chunks, {human(self.seconds)}, {saved:.0%} less than in one piece"

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
    """A lane a stage and a sign a chunk, on one scale for all passes."""
    passes = timelines(plan, layer)
    columns = max(width - LABEL - 1, 20)
    longest_s = max(found.seconds for found in passes)
    yield f"layer {layer}: sign = chunk, a column = {human(longest_s / columns)}, % = share of the pass it is busy"
    for found in passes:
        yield ""
        yield found.title
        for stage, events, busy in found.lanes():
            lane = _lane(events, columns / longest_s if longest_s else 0.0, columns)
            yield f"{stage.value:<{LABEL - 5}}{busy:>4.0%} |{lane}"


def human(seconds: float) -> str:
    """Three digits in the unit that suits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _lane(events: list[Event], columns_per_s: float, columns: int) -> str:
    """The chunks of a stage where they run; one that has the middle of no column takes a blank one near its own."""
    signs = [" "] * columns
    spans = [[round(at * columns_per_s) for at in (event.start_s, event.end_s)] for event in events]
    for event, (first, last) in zip(events, spans, strict=True):
        signs[first:last] = SIGNS[event.chunk % len(SIGNS)] * (last - first)
    for event, (first, last) in zip(events, spans, strict=True):
        at = min(first, columns - 1)
        if first == last and signs[at] == " ":
            signs[at] = SIGNS[event.chunk % len(SIGNS)]
    return "".join(signs).rstrip()
