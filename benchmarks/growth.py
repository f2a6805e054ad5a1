"""How seconds grow with size: fitted exponents, and the picture of cost versus size."""

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
    """The seconds of one method along one axis, sizes ascending."""

    axis: str
    method: str
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def exponent(self) -> float | None:
        """The power of size that seconds grow with over the largest sizes (least squares of logarithms)."""
        if len(self.sizes) < 3:
            return None
        return float(np.polyfit(np.log(self.sizes[-FITTED:]), np.log(self.seconds[-FITTED:]), 1)[0])


def curves(result: Result) -> list[Curve]:
    """The curves of a subject by axis and method."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in (row for section in result.sections for row in section.rows):
        if row.size is not None and row.seconds is not None:
            found.setdefault(row.axis, {}).setdefault(row.method, []).append((row.size, row.seconds))
    return [
        Curve(axis, method, *(tuple(column) for column in zip(*sorted(points), strict=True)))
        for axis, methods in found.items()
        for method, points in methods.items()
    ]


def draw(result: Result, path: Path) -> None:
    """Write the picture as SVG, a panel an axis, if there are curves; the same figures give the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    lines = curves(result)
    axes = list(dict.fromkeys(line.axis for line in lines))
    if not axes:
        return
    methods = list(dict.fromkeys(line.method for line in lines))
    rows, columns = -(-len(axes) // COLUMNS), min(COLUMNS, len(axes))
    with mpl.rc_context({"svg.hashsalt": "moeplan", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(WIDTH_IN * columns, HEIGHT_IN * rows + 0.4), layout="constrained")
        handles: dict[str, Any] = {}
        for at, axis in enumerate(axes):
            panel = figure.add_subplot(
                rows, columns, at + 1, xscale="log", yscale="log", xlabel=axis, ylabel="CPU seconds"
            )
            for line in (line for line in lines if line.axis == axis):
                color, marker = STYLES[methods.index(line.method) % len(STYLES)]
                (handles[line.method],) = panel.plot(
                    line.sizes, line.seconds, color=color, marker=marker, markersize=4, linewidth=1.2
                )
            _dress(panel, sorted({size for line in lines if line.axis == axis for size in line.sizes}))
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def _dress(panel: Any, sizes: list[float]) -> None:
    panel.minorticks_off()
    panel.grid(color="0.9")
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xticks(sizes, [f"{size:,g}" for size in sizes])
