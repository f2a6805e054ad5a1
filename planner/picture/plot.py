"""Plot: lines, bands, dots and steps over two axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from ...solvers.arrays import Floats
from .axis import Axis, frame
from .svg import BLUE, LINE, SIGN, WIDE, Picture, anchor, head, hover, path, text

MOST_DOTS = 600  # with words of their own


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Values along a plot's axis; where one is not a number, a line is broken."""

    x: ArrayLike  #: Of steps the edges, one more than steps
    y: ArrayLike
    name: str = ""  #: In the legend; empty: not there
    colour: int = BLUE
    shape: Literal["line", "dashed", "faint", "steps", "dots", "ticks"] = "line"
    #: low, high: ends of intervals of dots, or of a band around a line
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    words: Sequence[str] = ()  #: Of each dot, where one points at it


@dataclass(frozen=True, slots=True, eq=False)
class Plot(Picture):
    """Lines over two axes."""

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    rules: Sequence[tuple[float, str]] = ()  #: Values of x with a line across, and its name
    height: float = 190.0

    def content(self) -> tuple[str, float]:
        """Elements of an SVG, and their height."""
        x = self.x.spanning(_together([line.x for line in self.lines]))
        y = self.y.spanning(_together([one for line in self.lines for one in (line.y, line.low, line.high)]))
        named = [(line.name, line.colour) for line in self.lines if line.name and np.size(line.x)]
        legend, top = head(self.title, named)
        if self.y.title:
            legend += text(0, top + 10, self.y.title, "s")
            top += LINE
        top += LINE if self.rules else 4
        left = 8 + SIGN * max(len(words) for _, words in y.marks)
        right, bottom = WIDE - 8.0, top + self.height
        grid = frame(x, y, (left, right), (top, bottom))
        drawn = [_drawn(line, x, y, (left, right), (top, bottom)) for line in self.lines]
        for value, name in self.rules:
            at = float(x.place(value, left, right))
            drawn.append(f'<path class="r" stroke-dasharray="3 3" d="M{at:.1f} {top:.1f}V{bottom:.1f}"/>')
            drawn.append(text(at, top - 4, name, "s", anchor(at)))
        return legend + grid + "".join(drawn), bottom + 2 * LINE + 2


def _drawn(line: Line, x: Axis, y: Axis, across: tuple[float, float], down: tuple[float, float]) -> str:
    """A line, its band or intervals, or its dots."""
    ups = down if y.falling else down[::-1]
    at_x, at_y = x.place(line.x, *across), y.place(line.y, *ups)
    content = ""
    if line.low is not None and line.high is not None:
        low, high = (y.place(one, *ups) for one in (line.low, line.high))
        if line.shape == "line":
            points = path(np.concatenate([at_x, at_x[::-1]]), np.concatenate([low, high[::-1]]))
            content = f'<path class="f{line.colour}" fill-opacity=".18" stroke="none" d="{points}Z"/>'
        else:
            strokes = "".join(f"M{c:.1f} {a:.1f}V{b:.1f}" for a, b, c in zip(low, high, at_x, strict=True))
            content = f'<path class="l{line.colour}" stroke-width="1.5" d="{strokes}"/>'
    if line.shape == "ticks":
        strokes = "".join(f"M{a:.1f} {b - 4:.1f}v8" for a, b in zip(at_x, at_y, strict=True))
        return content + f'<path class="l{line.colour}" stroke-width="2" d="{strokes}"/>'
    if line.shape == "dots" and line.words and len(line.words) <= MOST_DOTS:
        dots = zip(at_x, at_y, line.words, strict=True)
        return content + "".join(
            f'<circle class="f{line.colour}" cx="{a:.1f}" cy="{b:.1f}" r="3">{hover(words)}</circle>'
            for a, b, words in dots
        )
    if line.shape == "dots":
        strokes = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(at_x, at_y, strict=True))
        return content + f'<path class="l{line.colour}" stroke-width="5" stroke-linecap="round" d="{strokes}"/>'
    if line.shape == "steps":
        at_x, at_y = np.repeat(at_x, 2)[1:-1], np.repeat(at_y, 2)
    kind = {"dashed": ' stroke-dasharray="5 3"', "faint": ' stroke-opacity=".45"'}.get(line.shape, "")
    return content + f'<path class="l{line.colour}" stroke-width="2"{kind} d="{path(at_x, at_y)}"/>'


def _together(values: Sequence[ArrayLike | None]) -> Floats:
    """Values of all arrays in one, absent arrays left out."""
    return np.concatenate([np.zeros(0), *(np.asarray(one, np.float64).ravel() for one in values if one is not None)])
