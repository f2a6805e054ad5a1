"""Picture of a page as SVG, and its parts: text, paths, a title with a legend; in colours for light, dark and paper.

A picture is 400 units wide, as a phone shows it; a wider page puts several side by side.
"""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...solvers.arrays import Floats

if TYPE_CHECKING:
    from rich.console import Console

WIDE, SMALL = 400, 160  # units of a picture's width
SIGN = 6.1  # units of a sign's width, about
LINE = 15.0  # units of a line of text
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


def head(title: str, legend: Sequence[tuple[str, int]]) -> tuple[str, float]:
    """The title, and the legend in as many lines as it takes; and their height."""
    content, top = (text(0, 12, title, "t b", most=56), 20.0) if title else ("", 2.0)
    at = 0.0
    for name, colour in dict.fromkeys(legend):
        wide = 18 + SIGN * len(name)
        if at and at + wide > WIDE:
            at, top = 0.0, top + LINE
        content += f'<rect class="f{colour}" x="{at:.0f}" y="{top + 2:.0f}" width="9" height="9" rx="2"/>'
        content += text(at + 13, top + 10, name, "t", most=60)
        at += wide + 8
    return content, top + (LINE + 3 if legend else 0)


def path(x: Floats, y: Floats) -> str:
    """A line through points, broken where one is not known."""
    content, pen, last = list[str](), "M", ""
    for known, a, b in zip(np.isfinite(x) & np.isfinite(y), x, y, strict=True):
        point = f"{a:.1f} {b:.1f}"
        if known and (pen == "M" or point != last):
            content.append(pen + point)
        pen, last = "L" if known else "M", point
    return "".join(content)


def text(x: float, y: float, words: str, kind: str, anchor: str = "start", *, most: int = 64) -> str:
    """Words at a place, escaped, of at most so many signs."""
    words = shortened(words, most)
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{side}>{html.escape(words)}</text>' if words else ""


def shortened(words: str, most: int) -> str:
    """Words of at most so many signs, cut in the middle: the end of a path tells more."""
    return words if len(words) <= most else f"{words[: most // 3]}...{words[most // 3 + 3 - most :]}"


def anchor(at: float) -> str:
    """Anchor of a text that must stay inside the picture."""
    return "start" if at < 40 else "end" if at > WIDE - 40 else "middle"


def hover(words: str) -> str:
    """Tooltip of a shape, escaped."""
    return f"<title>{html.escape(words)}</title>" if words else ""
