"""The timeline of a pipelined layer in files: a page of figures, and a trace for Chrome or Perfetto."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import write_json
from ..runtime.plan import Plan
from ..solvers.pipemoe.simulate import Stage
from .page import Section, write_page
from .timeline import Timeline, timelines

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
        write_json(path, {"traceEvents": list(trace_events(passes, layer)), "displayTimeUnit": "ns"})
        return
    text = f"{plan.model.name}, {', '.join(plan.strategies)}; seconds of a chunk are means over the fitted steps."
    write_page(path, f"Layer {layer}: how its chunks overlap", text, (_section(found) for found in passes))


def trace_events(passes: list[Timeline], layer: int) -> list[dict[str, Any]]:
    """The passes as trace events in microseconds: a process a pass, a thread a stage, an event a chunk."""
    found: list[dict[str, Any]] = []
    for process, one in enumerate(passes):
        name = f"layer {layer}, {one.name}, degree {one.degree}"
        found.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}})
        for thread, (stage, events) in enumerate(one.lanes()):
            found.append(
                {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": stage.value}}
            )
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


def _section(one: Timeline) -> Section:
    return Section(f"{one.name}, degree {one.degree}", f"{one.seconds * 1e6:,.1f} us in all", _figure(one))


def _figure(one: Timeline) -> "Figure":
    """A bar a chunk, on a lane a stage."""
    import plotly.graph_objects as go

    events = one.events
    figure = go.Figure(
        go.Bar(
            y=[event.stage.value for event in events],
            base=[event.start_s * 1e6 for event in events],
            x=[(event.end_s - event.start_s) * 1e6 for event in events],
            text=[str(event.chunk) for event in events],
            marker={"color": [COLOURS[event.chunk % 2] for event in events], "line": {"color": "#fff", "width": 1}},
            orientation="h",
            textposition="inside",
            hovertemplate="%{y} %{text}: from %{base:.1f} us, %{x:.1f} us<extra></extra>",
        )
    )
    order = [stage.value for stage in reversed(Stage)]
    figure.update_yaxes(categoryorder="array", categoryarray=order).update_xaxes(title_text="us")
    return figure.update_layout(height=240, barmode="overlay")
