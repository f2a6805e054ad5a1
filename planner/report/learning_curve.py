"""Screen and picture of `moeplan solve --learning-curve`."""

import os
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...files import check_target
from ...runtime.plan import Metric
from ..document import drawn, write_page
from ..learning_curve import LearningCurve

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console

__all__ = ["as_dict", "check_page", "curve_report", "write_curve"]

SHARES = (0.95, 0.99)


def curve_report(curve: LearningCurve, console: "Console") -> None:
    """The points as a table, and whether more tokens would help."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in ("fit tokens", f"{curve.unit}s", "subsets", "fewer copies held out (95 %)", "of the last"):
        table.add_column(header, justify="right")
    last = curve.points[-1].gain.value
    for point in curve.points:
        share = f"{point.gain.value / last:.1%}" if last > 0 else "-"
        sizes = (f"{point.num_tokens:,}", str(point.num_units), str(point.num_subsets))
        table.add_row(*sizes, _ranged(point.gain), share)
    console.print(table)
    console.print(
        f"copies to other {_places(curve)}, per token and layer, fewer than contiguous, {curve.dispatch_model}"
    )
    console.print()
    for line in _words(curve):
        console.print(line)


def as_dict(curve: LearningCurve) -> dict[str, Any]:
    """The curve as a JSON object."""
    return {
        "metric": curve.metric,
        "unit": curve.unit,
        "dispatch_model": curve.dispatch_model,
        "points": [
            {
                "num_units": one.num_units,
                "num_tokens": one.num_tokens,
                "num_subsets": one.num_subsets,
                "gain": one.gain.model_dump(),
            }
            for one in curve.points
        ],
        "last_doubling": curve.last_doubling.model_dump(),
        "saturated": curve.saturated,
        "num_solves": curve.num_solves,
        "num_capped": curve.num_capped,
        "wall_s": curve.wall_s,
    }


def check_page(path: str | os.PathLike[str]) -> None:
    """Refuse a page that would be taken for a plan, or that cannot be written."""
    if not str(path).endswith(".html"):
        raise UsageError(f"-o {path} with --learning-curve; it writes no plan, expected a page: name it .html")
    check_target(path)


def write_curve(curve: LearningCurve, path: str | os.PathLike[str]) -> None:
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


def _places(curve: LearningCurve) -> str:
    """Where the copies go."""
    return "nodes" if curve.metric == "node_copies" else "devices"


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
