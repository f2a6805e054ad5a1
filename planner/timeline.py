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

__all__ = ["Timeline", "timeline_picture", "timelines"]

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"  # of the chunks
LABEL = 10


@dataclass(frozen=True, slots=True)
class Timeline:
    """One pass of one layer.

    Parameters
    ----------
    name
        "one piece", "forward" or "backward".
    """

    name: str
    degree: int
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """From the first dispatch to the last combine."""
        return self.events[-1].end_s

    def lanes(self) -> Iterator[tuple[Stage, list[Event]]]:
        """The events of every stage."""
        for stage in Stage:
            yield stage, [event for event in self.events if event.stage is stage]


def timelines(plan: Plan, layer: int) -> list[Timeline]:
    """The layer in one piece, then its passes at the plan's degrees.

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

    def run(name: str, degree: int, stages: StageSeconds, *, back: bool = False) -> Timeline:
        dispatch, experts, combine = (column[layer] for _, column in stages)
        first, last = (combine, dispatch) if back else (dispatch, combine)
        chunks = ([first] * degree, [experts] * degree, [last] * degree)
        return Timeline(name, degree, simulate(*chunks, full_duplex=options.full_duplex))

    found = [run("one piece", 1, options.whole), run("forward", pipeline.forward[layer], options.forward)]
    if pipeline.backward is not None and options.backward_pass is not None:
        found.append(run("backward", pipeline.backward[layer], options.backward_pass, back=True))
    return found


def timeline_picture(plan: Plan, layer: int, width: int) -> Iterable[str]:
    """A lane a stage and a sign a chunk, on one scale for all passes."""
    passes = timelines(plan, layer)
    columns = max(width - LABEL - 1, 20)
    longest_s = max(found.seconds for found in passes)
    yield f"layer {layer}: sign = chunk, a column = {_human(longest_s / columns)}"
    for found in passes:
        chunks = "1 chunk" if found.degree == 1 else f"{found.degree} chunks"
        yield ""
        yield f"{found.name}, {chunks}, {_human(found.seconds)}"
        for stage, events in found.lanes():
            yield f"{stage.value:<{LABEL}}|{_lane(events, columns / longest_s if longest_s else 0.0, columns)}"


def _lane(events: list[Event], columns_per_s: float, columns: int) -> str:
    """The chunks of a stage where they run; a chunk shorter than a column still has one."""
    signs = [" "] * columns
    for event in events:
        first = min(int(event.start_s * columns_per_s), columns - 1)
        last = max(int(event.end_s * columns_per_s), first + 1)
        signs[first:last] = SIGNS[event.chunk % len(SIGNS)] * (min(last, columns) - first)
    return "".join(signs).rstrip()


def _human(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
