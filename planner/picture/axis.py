"""Axis of a picture: its ends, its round numbers, and the frame that two of them make."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ...solvers.arrays import Floats
from .svg import anchor, text

MOST_TICKS = 5


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

    def spanning(self, values: Floats) -> "Axis":
        """The axis with its ends, of these values where it has none."""
        known = values[np.isfinite(values) & ((values > 0) | (not self.log))]
        low, high = self.ends or (float(known.min(initial=math.inf)), float(known.max(initial=-math.inf)))
        if low > high:
            low, high = 1.0, 2.0
        low, high = (min(low, 0.0), max(high, 0.0)) if self.zero else (low, high)
        if low == high:
            low, high = (low / 2, high * 2) if self.log else (low - 0.5, high + 0.5)
        return replace(self, ends=(low, high))

    def place(self, values: ArrayLike, start: float, end: float) -> Floats:
        """Coordinates of values on an axis that goes from `start` to `end`."""
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
        values = _round_numbers(*self.ends, log=self.log)
        words = [*map(self.text or short, values)]
        if len(set(words)) < len(words):  # a narrow axis
            words = [f"{value:.6g}" for value in values]
        return [*zip(values, words, strict=True)]


def short(value: float) -> str:
    """A number in few signs: 12, 0.5, 20k, 3M."""
    rounded = abs(float(f"{value:.3g}"))
    for least, each, sign in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if rounded >= least:
            return f"{value / each:.3g}{sign}"
    return f"{value:,.0f}" if rounded >= 1000 else f"{value:.3g}"


def ordinals(size: int, each: int = 1) -> Iterator[tuple[float, str]]:
    """Ticks at a few of so many rows, each of `each`, by the number of its first."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 32, 64, 128, size) if size <= 9 * step)
    return ((at, str(at * each)) for at in range(0, size, step))


def frame(x: Axis, y: Axis | None, across: tuple[float, float], down: tuple[float, float], *, grid: bool = True) -> str:
    """Grid, ticks and the title of x."""
    (left, right), (top, bottom), content = across, down, ""
    for value, words in x.marks:
        at = float(x.place(value, left, right))
        content += f'<path class="g" d="M{at:.1f} {top:.1f}V{bottom:.1f}"/>' if grid else ""
        content += text(at, bottom + 12, words, "s", anchor(at))
    for value, words in y.marks if y is not None else ():
        assert y is not None
        at = float(y.place(value, *((top, bottom) if y.falling else (bottom, top))))
        content += f'<path class="g" d="M{left:.1f} {at:.1f}H{right:.1f}"/>' if grid else ""
        content += text(left - 5, at + 4, words, "s", "end")
    return content + text((left + right) / 2, bottom + 26, x.title, "s", "middle")


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
