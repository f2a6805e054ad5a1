"""Screen and picture of `moeplan solve --learning-curve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ...runtime.plan import Metric
from ..document import Column, Section, Table, Text, drawn, to_console, write_page
from ..evaluate.metrics import NODE_COPIES
from ..learning_curve import LearningCurve

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console

__all__ = ["as_dict", "curve_report", "write_curve"]

SHARES = (0.95, 0.99)


def curve_report(curve: LearningCurve, console: "Console") -> None:
    """The points as a table, and whether more tokens would help."""
    points, last = curve.points, curve.points[-1].gain.value
    columns = {
        "fit tokens": [f"{point.num_tokens:,}".rjust(len("fit tokens")) for point in points],
        f"{curve.unit}s": [str(point.num_units) for point in points],
        "subsets": [str(point.num_subsets) for point in points],
        "fewer copies held out (95 %)": [_ranged(point.gain) for point in points],
        "of the last": [f"{point.gain.value / last:.1%}" if last > 0 else "-" for point in points],
    }
    places = "nodes" if curve.metric == NODE_COPIES else "devices"
    what = f"copies to other {places}, per token and layer, fewer than contiguous, {curve.dispatch_model}"
    table = Table([Column(header, cells) for header, cells in columns.items()], whole=True)
    to_console([Section("", (table, Text.of(what))), Section("", (Text.of(*_words(curve)),))], console)


def as_dict(curve: LearningCurve) -> dict[str, Any]:
    """The curve as a JSON object."""
    fields: dict[str, Any] = TypeAdapter(LearningCurve).dump_python(curve, mode="json")
    return fields | {"saturated": curve.saturated}


def write_curve(curve: LearningCurve, path: Path) -> None:
    """The curve as a page."""
    text = f"Copies that a placement saves on held-out {curve.unit}s, by the tokens that it was fitted to."
    write_page(
        path, "How many tokens are enough", text, [drawn("Learning curve", " ".join(_words(curve)), _drawn(curve))]
    )


def _words(curve: LearningCurve) -> list[str]:
    points, step = curve.points, curve.last_doubling
    if points[-1].gain.value <= 0:
        return ["no gain at any size: no number of tokens is enough"]
    lines = [_enough(curve, share) for share in SHARES]
    doubled = f"the last doubling, to {points[-1].num_tokens:,} tokens, saved {_ranged(step)} copies more"
    if curve.saturated:
        more = "more tokens would hardly help"
    elif step.low is None or step.low <= 0:
        more = "that more tokens would help is not shown"
    else:
        more = "more tokens would help: record more"
    lines.append(f"{doubled}: {more}")
    solved = f"{curve.num_solves} solves in {curve.wall_s:.0f} s"
    if curve.num_capped:
        solved += f", {curve.num_capped} ended by time: another run may differ; give them more with --time-limit"
    return [*lines, solved]


def _enough(curve: LearningCurve, share: float) -> str:
    """From how many tokens on there is a share of the last gain; units are not divided to try fewer."""
    point = curve.enough(share)
    if point is curve.points[-1]:
        return f"{share:.0%} of the last gain from all {point.num_tokens:,} tokens only"
    if point is not curve.points[0]:
        return f"{share:.0%} of the last gain from {point.num_tokens:,} tokens on"
    fewest = f"{point.num_tokens:,} tokens, {point.num_units} {curve.unit}{'s' if point.num_units > 1 else ''}"
    return f"{share:.0%} of the last gain already from the fewest tried on, {fewest}; perhaps from fewer"


def _ranged(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return f"{metric.value:.3f}"
    return f"{metric.value:.3f} ({metric.low:.3f} to {metric.high:.3f})"


def _drawn(curve: LearningCurve) -> "Figure":
    import plotly.graph_objects as go

    gains = [one.gain for one in curve.points]
    above = [(gain.value if gain.high is None else gain.high) - gain.value for gain in gains]
    below = [gain.value - (gain.value if gain.low is None else gain.low) for gain in gains]
    figure = go.Figure(
        go.Scatter(
            x=[one.num_tokens for one in curve.points],
            y=[gain.value for gain in gains],
            error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below},
            mode="lines+markers",
        )
    )
    return figure.update_layout(xaxis={"type": "log", "title": "fit tokens"}, yaxis={"title": "copies saved"})
