"""Card of a plan: the answer and the loads as an SVG of the size that links are shown with."""

import html
import textwrap
from collections.abc import Mapping

from ...runtime.plan import Part, Plan
from ..evaluate.tally import Tally
from ..picture import LIGHT, PICTURE_STYLE, Picture, colour_rules
from ..picture.svg import shortened
from .answer import answer, headline
from .pictures import histogram, strips

CARD = (1200, 630)
TITLE, LINE, LINES = 44, 54, 7  # signs of the title and of a line, and lines of the answer, beside the histogram


def card(plan: Plan, title: str, shown: tuple[Part, str, str] | None, tallies: Mapping[str, Tally]) -> str:
    """The SVG of a plan; without what was `shown` (`PlanPage.shown`), or tallies, of words alone."""
    width, height = CARD
    lines = textwrap.wrap(answer(plan), LINE, max_lines=LINES, placeholder=" ...")
    words = headline(plan)
    content = _large(40, 62, shortened(title, TITLE), 24, "s")
    content += _large(40, 140, words, min(52, 940 // max(len(words), 1)), "t", bold=True)
    content += "".join(_large(40, 182 + 26 * at, line, 19, "t") for at, line in enumerate(lines))
    if shown is not None and tallies:
        part, today, ours = shown
        content += _nested(histogram(part, tallies, today, [ours], height=130), 640, 30, 520)
        for at, strip in enumerate(strips(part, tallies, today, [ours], height=100)):
            content += _nested(strip, 40 + 600 * at, 356, 520)
    content += _large(40, height - 12, f"moeplan report, plan {plan.plan_sha256[:12]}", 14, "s")
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = f"<style>{PICTURE_STYLE}{colour_rules(LIGHT)}</style>"
    paper = f'<rect class="p" width="{width}" height="{height}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{paper}{content}</svg>\n'


def _large(x: float, y: float, words: str, size: int, kind: str, *, bold: bool = False) -> str:
    style = f"font-size:{size}px{';font-weight:700' * bold}"
    return f'<text class="{kind}" x="{x}" y="{y}" style="{style}">{html.escape(words)}</text>'


def _nested(picture: Picture, x: float, y: float, width: float) -> str:
    """A picture inside another, so wide."""
    content, height = picture.content()
    box = f'viewBox="0 0 {picture.width} {height:.0f}"'
    return f'<svg x="{x}" y="{y}" width="{width}" height="{width * height / picture.width:.0f}" {box}>{content}</svg>'
