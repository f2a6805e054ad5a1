"""Bars along one axis, each under its name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .axis import Axis, frame
from .svg import BLUE, LINE, SIGN, WIDE, Picture, head, hover, text


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
        content, top = head(self.title, self.legend)
        bottom = top + 32 * len(self.bars)
        content += frame(x, None, (0, WIDE - 8.0), (top, bottom))
        for number, bar in enumerate(self.bars):
            at = top + 32 * number
            content += text(0, at + 12, bar.name, "t", most=36) + text(WIDE - 8, at + 12, bar.end, "s", "end")
            for span in bar.spans:
                first, last = x.place([span.start, span.start + span.length], 0, WIDE - 8.0).tolist()
                shape = f'x="{first:.2f}" y="{at + 16:.1f}" width="{max(last - first, 0):.2f}" height="12"'
                content += f'<rect class="f{span.colour}" {shape}>{hover(span.words)}</rect>'
                if span.sign and last - first > SIGN * len(span.sign):
                    content += text((first + last) / 2, at + 26, span.sign, "p", "middle")
        return content, bottom + 2 * LINE + 2
