"""Pictures of a page as SVG, without a script: plots, bars and heat maps, in colours for light, dark and paper.

A picture is 400 units wide, as a phone shows it; a wider page puts several side by side.
"""

import base64
import html
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from rich.console import Console

WIDE, SMALL = 400, 160  # units of a picture's width
SIGN = 6.1  # units of a sign's width, about
LINE = 15.0  # units of a line of text
MOST_TICKS, MOST_DOTS = 5, 600
# Of text, of what is less important, of grids, of the page; then of lines and bars by their number.
LIGHT: tuple[str, ...] = ("#1c2330", "#667085", "#dfe3ea", "#ffffff")
LIGHT += ("#8a93a3", "#2563d8", "#d9730d", "#128a60", "#7c4fd0", "#c93a54", "#0e93a8", "#9a7b00")
DARK: tuple[str, ...] = ("#e7eaf0", "#98a2b3", "#343b49", "#14171e")
DARK += ("#8a93a3", "#6ea0ff", "#f59a45", "#41c795", "#b394f5", "#f47f93", "#4ecbe0", "#d9b93b")
GREY, BLUE, ORANGE, GREEN, VIOLET, RED, CYAN, OCHRE = range(8)
PICTURE_STYLE = (
    "text{font:11px system-ui,sans-serif}.b{font-weight:600;font-size:12px}"
    "path{fill:none}path[fill-opacity]{stroke:none}image{image-rendering:pixelated}"
)
RAMP = ((0, 247, 250, 255), (0.25, 190, 213, 245), (0.5, 107, 158, 232), (0.75, 37, 99, 216), (1, 12, 34, 94))


def colour_rules(colours: Sequence[str]) -> str:
    """Style rules of a picture in these colours."""
    ink, soft, grid, paper, *series = colours
    rules = f".t{{fill:{ink}}}.s{{fill:{soft}}}.g{{stroke:{grid}}}.r{{stroke:{soft}}}.p{{fill:{paper}}}"
    return rules + "".join(f".f{at}{{fill:{one}}}.l{at}{{stroke:{one}}}" for at, one in enumerate(series))


class Picture:
    """A picture of a page; a console leaves it out."""

    title: str
    width = WIDE

    def content(self) -> tuple[str, float]:
        """Elements of an SVG, and their height."""
        raise NotImplementedError

    def print(self, console: "Console") -> None:
        """Print nothing."""

    def html(self) -> str:
        """Figure of a page."""
        content, height = self.content()
        about = f'role="img" aria-label="{html.escape(self.title)}"'
        return f'<figure><svg viewBox="0 0 {self.width} {height:.0f}" {about}>{content}</svg></figure>'


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a picture."""

    title: str = ""
    log: bool = False
    zero: bool = False  #: Whether it holds 0
    ends: tuple[float, float] | None = None  #: None: as the lines need
    ticks: Sequence[tuple[float, str]] = ()  #: Places with their names; empty: round numbers
    falling: bool = False  #: Whether larger numbers are further down
    text: Callable[[float], str] | None = None  #: Words of a round number; None: its digits

    def spanning(self, values: NDArray[np.float64]) -> "Axis":
        """The axis with its ends, of these values where it has none."""
        known = values[np.isfinite(values) & ((values > 0) | (not self.log))]
        low, high = self.ends or (float(known.min(initial=math.inf)), float(known.max(initial=-math.inf)))
        if low > high:
            low, high = 1.0, 2.0
        low, high = (min(low, 0.0), max(high, 0.0)) if self.zero else (low, high)
        if low == high:
            low, high = (low / 2, high * 2) if self.log else (low - 0.5, high + 0.5)
        return replace(self, ends=(low, high))

    def place(self, values: ArrayLike, start: float, end: float) -> NDArray[np.float64]:
        """Where values are between two coordinates."""
        assert self.ends is not None
        numbers = np.asarray(values, np.float64)
        (low, high), shown = self.ends, numbers
        if self.log:
            low, high = math.log(low), math.log(high)
            shown = np.log(np.maximum(numbers, 1e-300))
        shares = np.clip((shown - low) / (high - low), 0, 1)
        return np.asarray(start + shares * (end - start))

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Places of ticks with their words."""
        assert self.ends is not None
        if self.ticks:
            return [*self.ticks]
        text = self.text or short
        return [(value, text(value)) for value in _round_numbers(*self.ends, log=self.log)]


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Values along a plot's axis; where one is not a number, a line is broken."""

    x: ArrayLike
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
        legend, top = _head(self.title, named)
        if self.y.title:
            legend += _text(0, top + 10, self.y.title, "s")
            top += LINE
        top += LINE if self.rules else 4
        left = 8 + SIGN * max(len(words) for _, words in y.marks)
        right, bottom = WIDE - 8.0, top + self.height
        frame = _frame(x, y, (left, right), (top, bottom))
        drawn = [_drawn(line, x, y, (left, right), (top, bottom)) for line in self.lines]
        for value, name in self.rules:
            at = float(x.place(value, left, right))
            drawn.append(f'<path class="r" stroke-dasharray="3 3" d="M{at:.1f} {top:.1f}V{bottom:.1f}"/>')
            drawn.append(_text(at, top - 4, name, "s", _anchor(at)))
        return legend + frame + "".join(drawn), bottom + 2 * LINE + 2


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a bar."""

    start: float
    length: float
    colour: int = BLUE
    words: str = ""  #: Where one points at it
    sign: str = ""  #: In it


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar under its name, with what stands at the end of the name's line."""

    name: str
    spans: Sequence[Span]
    end: str = ""

    @classmethod
    def stacked(cls, name: str, parts: Sequence[tuple[float, int, str]], end: str = "") -> "Bar":
        """A bar of lengths one after the other, each with its colour and words."""
        starts = np.cumsum([0.0, *(length for length, _, _ in parts)])
        spans = [Span(float(at), *part) for at, part in zip(starts, parts, strict=False)]
        return cls(name, spans, end)


@dataclass(frozen=True, slots=True)
class Bars(Picture):
    """Bars along one axis."""

    title: str
    bars: Sequence[Bar]
    x: Axis
    legend: Sequence[tuple[str, int]] = ()

    def content(self) -> tuple[str, float]:
        """Elements of an SVG, and their height."""
        ends = np.array([span.start + span.length for bar in self.bars for span in bar.spans])
        x = replace(self.x, zero=True).spanning(np.concatenate([[0.0], ends]))
        content, top = _head(self.title, self.legend)
        bottom = top + 32 * len(self.bars)
        content += _frame(x, None, (0, WIDE - 8.0), (top, bottom))
        for number, bar in enumerate(self.bars):
            at = top + 32 * number
            content += _text(0, at + 12, bar.name, "t", most=36) + _text(WIDE - 8, at + 12, bar.end, "s", "end")
            for span in bar.spans:
                first, last = x.place([span.start, span.start + span.length], 0, WIDE - 8.0).tolist()
                shape = f'x="{first:.2f}" y="{at + 16:.1f}" width="{max(last - first, 0):.2f}" height="12"'
                content += f'<rect class="f{span.colour}" {shape}>{_hover(span.words)}</rect>'
                if span.sign and last - first > SIGN * len(span.sign):
                    content += _text((first + last) / 2, at + 26, span.sign, "p", "middle")
        return content, bottom + 2 * LINE + 2


@dataclass(frozen=True, slots=True, eq=False)
class Heat(Picture):
    """A table of numbers as colours, from 0 to a `top` that several of them share."""

    title: str
    table: NDArray[Any]  #: `[R, C]`
    top: float
    x: Axis = Axis()
    y: Axis = Axis()
    unit: str = ""
    borders: Sequence[int] = ()  #: Rows and columns before which a line is drawn
    small: bool = False

    @property
    def width(self) -> int:  # type: ignore[override]
        """Units."""
        return SMALL if self.small else WIDE

    def content(self) -> tuple[str, float]:
        """Elements of an SVG, and their height."""
        rows, columns = self.table.shape
        content, top = _head(self.title, ())
        x, y = (replace(axis, ends=(0.0, float(size))) for axis, size in ((self.x, columns), (self.y, rows)))
        left, right = 0.0, self.width - 8.0
        if not self.small:
            x, y = (
                replace(one, ticks=[(at + 0.5, name) for at, name in one.ticks or _ordinals(one)]) for one in (x, y)
            )
            left = 8 + SIGN * max((len(words) for _, words in y.ticks), default=0)
            if y.title:
                content += _text(0, top + 10, y.title, "s")
                top += LINE
        side = right - left
        bottom = top + (side if rows == columns else min(max(11.0 * rows, 90), side))
        across, down = x.place(self.borders, left, right), y.place(self.borders, top, bottom)
        content += _image(self.table / (self.top or 1.0), left, top, side, bottom - top)
        lines = "".join(f"M{at:.1f} {top:.1f}V{bottom:.1f}" for at in across)
        lines += "".join(f"M{left:.1f} {at:.1f}H{right:.1f}" for at in down)
        content += f'<path class="r" stroke-width="{0.35 if self.small else 0.6}" d="{lines}"/>' if lines else ""
        if self.small:
            return content, bottom + 4
        content += _frame(x, replace(y, falling=True), (left, right), (top, bottom), grid=False)
        ramp = bottom + 2 * LINE + 6
        content += _image(np.arange(256)[None] / 255, right - 120, ramp, 80, 8)
        content += _text(right - 124, ramp + 8, "0", "s", "end") + _text(right - 36, ramp + 8, short(self.top), "s")
        return content + _text(0, ramp + 8, self.unit, "s"), ramp + LINE


def short(value: float) -> str:
    """A number in few signs: 12, 0.5, 20k, 3M."""
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            each = min(size, 1e3) if sign == "k" else size
            return f"{value / each:.3g}{sign}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _together(values: Sequence[ArrayLike | None]) -> NDArray[np.float64]:
    """All values that there are."""
    return np.concatenate([np.zeros(0), *(np.asarray(one, np.float64).ravel() for one in values if one is not None)])


def _ordinals(axis: Axis) -> Iterator[tuple[float, str]]:
    """A few rows or columns by their numbers."""
    assert axis.ends is not None
    size = int(axis.ends[1])
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 32, 64, 128, size) if size <= 9 * step)
    return ((at, str(at)) for at in range(0, size, step))


def _round_numbers(low: float, high: float, *, log: bool) -> list[float]:
    """A few round numbers between two ends."""
    if log and high > 4 * low:
        digits = (1, 2, 5) if high / low < 200 else (1,)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [digit * 10.0**decade for decade in decades for digit in digits]
        inside = [one for one in found if low * 0.999 <= one <= high * 1.001]
        return inside[:: -(-len(inside) // (MOST_TICKS + 1))] if len(inside) > 1 else [low, high]
    size = (high - low) / MOST_TICKS
    decade = 10.0 ** math.floor(math.log10(size))
    step = next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= size * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(at * step, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]


def _head(title: str, legend: Sequence[tuple[str, int]]) -> tuple[str, float]:
    """The title, and the legend in as many lines as it takes; and their height."""
    content, top = (_text(0, 12, title, "t b", most=56), 20.0) if title else ("", 2.0)
    at = 0.0
    for name, colour in dict.fromkeys(legend):
        wide = 18 + SIGN * len(name)
        if at and at + wide > WIDE:
            at, top = 0.0, top + LINE
        content += f'<rect class="f{colour}" x="{at:.0f}" y="{top + 2:.0f}" width="9" height="9" rx="2"/>'
        content += _text(at + 13, top + 10, name, "t", most=60)
        at += wide + 8
    return content, top + (LINE + 3 if legend else 0)


def _frame(
    x: Axis, y: Axis | None, across: tuple[float, float], down: tuple[float, float], *, grid: bool = True
) -> str:
    """Grid, ticks and the title of x."""
    (left, right), (top, bottom), content = across, down, ""
    for value, words in x.marks:
        at = float(x.place(value, left, right))
        content += f'<path class="g" d="M{at:.1f} {top:.1f}V{bottom:.1f}"/>' if grid else ""
        content += _text(at, bottom + 12, words, "s", _anchor(at))
    for value, words in y.marks if y is not None else ():
        assert y is not None
        at = float(y.place(value, *((top, bottom) if y.falling else (bottom, top))))
        content += f'<path class="g" d="M{left:.1f} {at:.1f}H{right:.1f}"/>' if grid else ""
        content += _text(left - 5, at + 4, words, "s", "end")
    return content + _text((left + right) / 2, bottom + 26, x.title, "s", "middle")


def _drawn(line: Line, x: Axis, y: Axis, across: tuple[float, float], down: tuple[float, float]) -> str:
    """A line, its band or intervals, or its dots."""
    ups = down if y.falling else down[::-1]
    at_x, at_y = x.place(line.x, *across), y.place(line.y, *ups)
    content = ""
    if line.low is not None and line.high is not None:
        low, high = (y.place(one, *ups) for one in (line.low, line.high))
        if line.shape == "line":
            points = _path(np.concatenate([at_x, at_x[::-1]]), np.concatenate([low, high[::-1]]))
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
            f'<circle class="f{line.colour}" cx="{a:.1f}" cy="{b:.1f}" r="3">{_hover(words)}</circle>'
            for a, b, words in dots
        )
    if line.shape == "dots":
        strokes = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(at_x, at_y, strict=True))
        return content + f'<path class="l{line.colour}" stroke-width="5" stroke-linecap="round" d="{strokes}"/>'
    if line.shape == "steps":
        at_x, at_y = np.repeat(at_x, 2)[1:], np.repeat(at_y, 2)[:-1]
    kind = {"dashed": ' stroke-dasharray="5 3"', "faint": ' stroke-opacity=".45"'}.get(line.shape, "")
    return content + f'<path class="l{line.colour}" stroke-width="2"{kind} d="{_path(at_x, at_y)}"/>'


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    """A line through points, broken where one is not known."""
    content, pen, last = list[str](), "M", ""
    for known, a, b in zip(np.isfinite(x) & np.isfinite(y), x, y, strict=True):
        point = f"{a:.1f} {b:.1f}"
        if known and (pen == "M" or point != last):
            content.append(pen + point)
        pen, last = "L" if known else "M", point
    return "".join(content)


def _image(shares: NDArray[Any], x: float, y: float, width: float, height: float) -> str:
    """Shares of 0 to 1 as an image of colours, a pixel a cell."""
    at, *channels = np.array(RAMP).T
    levels = np.linspace(0, 1, 256)
    palette = np.stack([np.interp(levels, at, channel) for channel in channels], axis=1).round().astype(np.uint8)
    pixels = (np.clip(np.nan_to_num(shares), 0, 1) * 255).round().astype(np.uint8)
    rows = np.concatenate([np.zeros((len(pixels), 1), np.uint8), pixels], axis=1)  # each begins with its filter
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", head),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    data = base64.b64encode(png).decode()
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    return f'<image {place} href="data:image/png;base64,{data}"/>'


def _anchor(at: float) -> str:
    """Anchor of a text that must stay inside the picture."""
    return "start" if at < 40 else "end" if at > WIDE - 40 else "middle"


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start", *, most: int = 64) -> str:
    if len(words) > most:  # the end of a path tells more than its middle
        words = f"{words[: most // 3]}...{words[most // 3 + 3 - most :]}"
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{side}>{html.escape(words)}</text>' if words else ""


def _hover(words: str) -> str:
    return f"<title>{html.escape(words)}</title>" if words else ""
