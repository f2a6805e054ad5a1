"""How seconds, or a quality, go with size: fitted exponents of seconds, and the picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.files import atomic_path

from .result import Result

FITTED = 4  # the largest sizes: at the small ones a call's own cost hides the growth
COLUMNS, WIDTH_IN, HEIGHT_IN = 2, 4.2, 2.8
STYLES = tuple(zip(("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), "osD^vP", strict=True))


@dataclass(frozen=True, slots=True)
class Curve:
    """The seconds of one method along one axis, sizes ascending; where it was not timed, the quality that is named."""

    axis: str
    method: str
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    quality: str = ""

    @property
    def exponent(self) -> float | None:
        """The power of size that seconds grow with over the largest sizes (least squares of logarithms)."""
        if len(self.sizes) < 3 or self.quality:
            return None
        return float(np.polyfit(np.log(self.sizes[-FITTED:]), np.log(self.values[-FITTED:]), 1)[0])


def curves(result: Result) -> list[Curve]:
    """The curves of a subject by axis and method; a single size makes none."""
    found: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    for section in result.sections:
        for row in section.rows:
            value, quality = (row.quality, section.quality) if row.seconds is None else (row.seconds, "")
            if row.size is not None and value is not None:
                found.setdefault(row.axis, {}).setdefault((row.method, quality), []).append((row.size, value))
    return [
        Curve(axis, method, sizes, values, quality)
        for axis, methods in found.items()
        for (method, quality), points in methods.items()
        if len({size for size, _ in points}) > 1
        for sizes, values in [zip(*sorted(points), strict=True)]
    ]


def draw(result: Result, path: Path) -> None:
    """Write the picture as SVG, a panel an axis, or remove it without curves; the same figures give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    lines = curves(result)
    axes = list(dict.fromkeys(line.axis for line in lines))
    if not axes:
        path.unlink(missing_ok=True)
        return
    methods = list(dict.fromkeys(line.method for line in lines))
    together = len(methods) <= len(STYLES)  # one legend for all panels, else one each
    rows, columns = -(-len(axes) // COLUMNS), min(COLUMNS, len(axes))
    with mpl.rc_context({"svg.hashsalt": "moeplan", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(WIDTH_IN * columns, HEIGHT_IN * rows + 0.4), layout="constrained")
        handles: dict[str, Any] = {}
        for at, axis in enumerate(axes):
            own = [line for line in lines if line.axis == axis]
            panel = figure.add_subplot(rows, columns, at + 1, xscale="log", xlabel=axis)
            found = _plot(panel, own, methods)
            handles |= found
            if not together:
                panel.legend(found.values(), found.keys(), frameon=False, fontsize=8)
        if together:
            figure.legend(
                handles.values(), handles.keys(), loc="outside upper center", ncols=2 * columns, frameon=False
            )
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def _plot(panel: Any, lines: list[Curve], methods: list[str]) -> dict[str, Any]:
    """Draw one panel, styles by the place among methods; the handles of its lines by method."""
    handles = {}
    for line in lines:
        color, marker = STYLES[methods.index(line.method) % len(STYLES)]
        (handles[line.method],) = panel.plot(
            line.sizes,
            line.values,
            color=color,
            marker=marker,
            markersize=6 if line.quality else 4,
            fillstyle="none" if line.quality else "full",  # qualities may coincide
            linewidth=1.2,
        )
    _dress(panel, lines[0].quality, sorted({size for line in lines for size in line.sizes}))
    return handles


def _dress(panel: Any, quality: str, sizes: list[float]) -> None:
    if quality:
        panel.set_ylabel(quality)
        if quality.endswith(", %"):
            panel.set_ylabel(quality.removesuffix(", %"))
            from matplotlib.ticker import PercentFormatter

            panel.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
        panel.set_ylim(bottom=0)
    else:
        panel.set(yscale="log", ylabel="CPU seconds")
    panel.minorticks_off()
    panel.grid(color="0.9")
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xticks(sizes, [f"{size:,g}" for size in sizes])
