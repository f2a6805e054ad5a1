"""The timeline of a pipelined layer in files: a page of figures, and a trace for Chrome or Perfetto."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import UsageError
from ....files import write_json
from ....runtime.plan import Plan
from ....solvers.pipemoe.seconds import Stage
from ...document import drawn, write_page
from .sections import degree_choices
from .timeline import BASIS, SIGNS, Timeline, timelines

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["trace_events", "write_timeline"]

COLOURS = ("#1f77b4", "#6baed6")  # of chunks in turn


def write_timeline(plan: Plan, layer: int, path: str | os.PathLike[str]) -> None:
    """Write the timeline of a layer, as a page to `.html` or as trace events to `.json`, atomically.

    Raises
    ------
    UsageError
        Another ending; no such layer.
    StorageError
        It cannot be written.
    """
    suffix = Path(path).suffix
    if suffix not in (".html", ".json"):
        raise UsageError(f"-o {path}; expected a name that ends in .html (a page) or .json (a Chrome trace)")
    passes = timelines(plan, layer)
    if suffix == ".json":
        about = {"model": plan.model.name, "layer": layer, "plan_sha256": plan.plan_sha256, "seconds": BASIS}
        events = trace_events(passes, layer)
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about})
        return
    text = (
        f"{plan.model.name}, {', '.join(plan.strategies)} ({degree_choices(plan)}); seconds of a chunk are {BASIS}, and"
        " all figures have one scale. A bar is a chunk, numbered where they are few; point at one for its seconds."
    )
    longest_s = max(one.seconds for one in passes)
    write_page(
        path,
        f"Layer {layer}: how its chunks overlap",
        text,
        (drawn(*_words(one), _figure(one, longest_s)) for one in passes),
    )


def trace_events(passes: list[Timeline], layer: int) -> list[dict[str, Any]]:
    """The passes as trace events in microseconds: a process a pass, a thread a stage, an event a chunk; none is 0."""
    found: list[dict[str, Any]] = []
    for process, one in enumerate(passes, start=1):
        found.append(_meta("process_name", process, 0, {"name": f"layer {layer}, {one.title}"}))
        found.append(_meta("process_sort_index", process, 0, {"sort_index": process}))
        for thread, (stage, events, _) in enumerate(one.lanes(), start=1):
            found.append(_meta("thread_name", process, thread, {"name": stage.value}))
            found.append(_meta("thread_sort_index", process, thread, {"sort_index": thread}))
            found += [
                {
                    "name": f"{stage.value} {event.chunk}",
                    "cat": stage.value,
                    "ph": "X",
                    "ts": event.start_s * 1e6,
                    "dur": (event.end_s - event.start_s) * 1e6,
                    "pid": process,
                    "tid": thread,
                    "args": {"chunk": event.chunk},
                }
                for event in events
            ]
    return found


def _meta(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _words(one: Timeline) -> tuple[str, str]:
    """A pass's heading, and how busy its stages are."""
    return one.title, ", ".join(f"{stage.value} {busy:.0%}" for stage, _, busy in one.lanes()) + " of the pass busy"


def _figure(one: Timeline, longest_s: float) -> "Figure":
    """A bar a chunk, on a lane a stage."""
    import plotly.graph_objects as go

    events = one.events
    figure = go.Figure(
        go.Bar(
            y=[event.stage.value for event in events],
            base=[event.start_s * 1e6 for event in events],
            x=[(event.end_s - event.start_s) * 1e6 for event in events],
            customdata=[event.chunk for event in events],
            text=[str(event.chunk) if one.degree <= len(SIGNS) else "" for event in events],
            marker={
                "color": [COLOURS[event.chunk % 2] for event in events],
                "line": {"color": "#fff", "width": 1 if one.degree <= len(SIGNS) else 0},
            },
            orientation="h",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate="%{y} %{customdata}: from %{base:.1f} us, %{x:.1f} us<extra></extra>",
        )
    )
    order = [stage.value for stage in reversed(Stage)]
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    figure.update_xaxes(title_text="us", range=[0, longest_s * 1.01e6])
    return figure.update_layout(height=220, barmode="overlay")
