"""The timeline of a pipelined layer: when each chunk is dispatched, computed and combined.

A picture of text, a page of figures, or a trace for Chrome or Perfetto. Seconds are the plan's: of one chunk in each
stage, mean over the fitted steps, at the layer's degrees.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....files import write_json
from ....runtime.plan import Plan
from ....solvers.pipemoe import simulate
from ....solvers.pipemoe.seconds import Event, Stage
from ...document import Section, Text, write_page
from ...figures import TimeUnit, percent
from ...picture import BLUE, CYAN, Axis, Bar, Bars, Span
from .sections import degree_choices, layer_passes, pipeline_options

SIGNS = "0123456789"  # of the chunks, where they are few
SHADES = " ░▒▓█"  # of a column, by the share of it that is busy
BASIS = "means over the fitted steps"
LABEL = 14
SLACK = 1e-9  # of a column, that rounding may leave busy
COLOURS = (BLUE, CYAN)  # of chunks in turn


@dataclass(frozen=True, slots=True)
class Timeline:
    """A pass of a layer, simulated."""

    name: str  #: "forward" or "backward", or either "in one piece"
    degree: int
    events: tuple[Event, ...]
    whole_s: float  #: The seconds of that pass in one piece

    @property
    def seconds(self) -> float:
        """Seconds from the first dispatch to the last combine."""
        return self.events[-1].end_s

    @property
    def title(self) -> str:
        """The pass, its chunks, its seconds and what overlap saves of them."""
        if self.degree == 1:
            return f"{self.name}, {TimeUnit.worded(self.seconds)}"
        saved = 1 - self.seconds / self.whole_s if self.whole_s else 0.0
        took = TimeUnit.worded(self.seconds)
        return f"{self.name}, {self.degree} chunks, {took}, {percent(saved)} less than in one piece"

    def lanes(self) -> Iterator[tuple[Stage, list[Event], float]]:
        """The events of every stage, and the share of the pass in which it is busy; else it is idle."""
        for stage in Stage:
            events = [event for event in self.events if event.stage is stage]
            busy_s = sum(event.end_s - event.start_s for event in events)
            yield stage, events, busy_s / self.seconds if self.seconds else 0.0


def timelines(plan: Plan, layer: int) -> list[Timeline]:
    """Timelines of a layer's passes, each in one piece, then in the plan's chunks where these are several.

    InputError where the plan decides no pipeline; UsageError where there is no such layer.
    """
    options = pipeline_options(plan)
    if not 0 <= layer < plan.model.num_layers:
        raise UsageError(f"--timeline {layer}; expected an MoE layer, 0 to {plan.model.num_layers - 1}")
    rows = list[Timeline]()
    for one in layer_passes(plan, options, layer):
        whole, chunks = (
            simulate(*(stage.tolist() for stage in stages), full_duplex=options.full_duplex)
            for stages in (one.whole, one.chunks)
        )
        rows.append(Timeline(f"{one.name} in one piece", 1, whole, whole[-1].end_s))
        if len(one.shares) > 1:
            rows.append(Timeline(one.name, len(one.shares), chunks, whole[-1].end_s))
    return rows


def timeline_picture(plan: Plan, layer: int, width: int, _folder: Path | None = None) -> Iterable[str]:
    """A lane a stage, all passes on one scale: a sign a chunk, or shades where chunks are too many for signs."""
    passes = timelines(plan, layer)
    columns = max(width - LABEL - 1, 20)
    longest_s = max(one.seconds for one in passes)
    pictures = [_lanes(one, longest_s, columns) for one in passes]
    shaded = any({*SHADES[1:]} & {*lane} for lanes in pictures for lane in lanes)
    yield f"layer {layer}, {BASIS}; {degree_choices(pipeline_options(plan))}"
    yield f"a column = {TimeUnit.worded(longest_s / columns)}, digit = chunk, % = share of the pass it is busy"
    if shaded:
        yield f"{SHADES[1:]} = share of a column that is busy, where chunks are too many for digits"
    for one, lanes in zip(passes, pictures, strict=True):
        yield ""
        yield one.title
        for (stage, _, busy), lane in zip(one.lanes(), lanes, strict=True):
            yield f"{stage.value:<{LABEL - 6}}{percent(busy):>5} |{lane}"


def write_timeline(plan: Plan, layer: int, path: str | os.PathLike[str], _folder: Path | None = None) -> None:
    """Write the timeline of a layer, as a page to `.html` or as trace events to `.json`; errors as of `timelines`."""
    suffix = Path(path).suffix
    if suffix not in (".html", ".json"):
        raise UsageError(f"-o {path}; expected a name that ends in .html (a page) or .json (a Chrome trace)")
    passes = timelines(plan, layer)
    if suffix == ".json":
        about = {"model": plan.model.name, "layer": layer, "plan_sha256": plan.plan_sha256, "seconds": BASIS}
        events = trace_events(plan, layer)
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about})
        return
    choices = degree_choices(pipeline_options(plan))
    text = (
        f"{plan.model.name}, {', '.join(plan.strategies)} ({choices}); seconds of a chunk are {BASIS}, and"
        " all figures have one scale. A bar is a chunk, numbered where they are few; point at one for its seconds."
    )
    sections = [Section("", (picture,)) for picture in pictures_of(passes)]
    write_page(path, f"Layer {layer}: how its chunks overlap", text, sections)


def pictures(plan: Plan, folder: Path, task: object) -> Iterator[Section]:
    """The layer that takes longest."""
    layers = [timelines(plan, layer) for layer in range(plan.model.num_layers)]
    longest = max(range(len(layers)), key=lambda layer: layers[layer][0].seconds)
    text = f"{BASIS}, on one scale. Another layer: moeplan show PLAN --timeline LAYER -o PAGE.html"
    yield Section(f"How chunks overlap in layer {longest}, the longest", (Text.of(text), *pictures_of(layers[longest])))


def pictures_of(passes: Sequence[Timeline]) -> list[Bars]:
    """Pictures of passes on one scale: a bar per stage, with a part per chunk, numbered where these are few."""
    unit = TimeUnit.up_to(max(one.seconds for one in passes))
    axis = Axis(unit.name, ends=(0.0, max(one.seconds for one in passes) * unit.per_s or 1.0))
    return [Bars(one.title, [_bar(one, *lane, unit) for lane in one.lanes()], axis) for one in passes]


def trace_events(plan: Plan, layer: int, _folder: Path | None = None) -> list[dict[str, Any]]:
    """The passes as trace events in microseconds: a process a pass, a thread a stage, an event a chunk; none is 0."""
    passes = timelines(plan, layer)
    trace: list[dict[str, Any]] = []

    def name(kind: str, process: int, thread: int, text: str) -> None:
        """Add the name of a process or thread, and its place."""
        for key, args in ((f"{kind}_name", {"name": text}), (f"{kind}_sort_index", {"sort_index": thread or process})):
            trace.append({"name": key, "ph": "M", "pid": process, "tid": thread, "args": args})

    for process, one in enumerate(passes, start=1):
        name("process", process, 0, f"layer {layer}, {one.title}")
        for thread, (stage, events, _) in enumerate(one.lanes(), start=1):
            name("thread", process, thread, stage.value)
            for event in events:
                named = {"name": f"{stage.value} {event.chunk}", "cat": stage.value, "args": {"chunk": event.chunk}}
                span = {"ts": event.start_s * 1e6, "dur": (event.end_s - event.start_s) * 1e6}
                trace.append({**named, "ph": "X", **span, "pid": process, "tid": thread})
    return trace


def _lanes(timeline: Timeline, longest_s: float, columns: int) -> list[str]:
    """The stages of a pass: by signs if every chunk that takes time can be seen, else by shades."""
    whole_s = longest_s or 1.0
    spans = [
        [(event.start_s / whole_s * columns, event.end_s / whole_s * columns) for event in events]
        for _, events, _ in timeline.lanes()
    ]
    if timeline.degree <= len(SIGNS):
        lanes = [_signed(lane, columns) for lane in spans]
        if all(len({*lane} - {" "}) == timeline.degree for lane in lanes):
            return lanes
    busy = [
        [sum(max(min(last, at + 1) - max(first, at), 0.0) for first, last in lane) for at in range(columns)]
        for lane in spans
    ]
    return ["".join(SHADES[min(math.ceil(share * 4 - SLACK), 4)] for share in lane).rstrip() for lane in busy]


def _signed(spans: Sequence[tuple[float, float]], columns: int) -> str:
    """Chunks of a stage where they run; a chunk too short for a column takes a blank column beside it."""
    signs, ends = [" "] * columns, [(round(start), round(end)) for start, end in spans]
    for sign, (first, last) in zip(SIGNS, ends, strict=False):
        signs[first:last] = sign * (last - first)
    for sign, (first, last) in zip(SIGNS, ends, strict=False):
        at = min(first, columns - 1)
        if first == last and signs[at] == " ":
            signs[at] = sign
    return "".join(signs).rstrip()


def _bar(one: Timeline, stage: Stage, events: Sequence[Event], busy: float, unit: TimeUnit) -> Bar:
    """The chunks of a stage, and the share of the pass that it is busy."""
    spans = [
        Span(
            event.start_s * unit.per_s,
            (event.end_s - event.start_s) * unit.per_s,
            COLOURS[event.chunk % 2],
            f"{stage.value} {event.chunk}: from {TimeUnit.worded(event.start_s)},"
            f" {TimeUnit.worded(event.end_s - event.start_s)}",
            str(event.chunk) if one.degree <= len(SIGNS) else "",
        )
        for event in events
    ]
    return Bar(stage.value, spans, f"{percent(busy)} busy")
