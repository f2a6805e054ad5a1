"""A monotone curve through the measured sizes.

Legend: n work, ascending; t seconds.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..measurement import MAX_SECONDS

MAX_KNOTS = 4096
DIGITS = 6  # significant, of a knot's seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Piecewise:
    """t(n) through knots that never fall: constant below the first, straight between two, the last slope beyond.

    Beyond, a power law grows at most in proportion to work: a steep last step is noise, and would explode.

    Notes
    -----
    A knot stands at every measured size, at the isotonic regression of all its seconds in the 1-norm: a lone slow size
    is outvoted by its neighbours, not averaged into them.
    """

    #: "piecewise" is straight in (log n, log t), a power law from knot to knot; "piecewise_linear" in (n, t), an
    #: alpha-beta line from knot to knot
    kind: Literal["piecewise", "piecewise_linear"] = "piecewise"
    #: works, seconds_at: the knots
    works: tuple[float, ...]
    seconds_at: tuple[float, ...]

    axes: ClassVar[tuple[str, ...]] = ("work",)
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        rising = all(one < two for one, two in itertools.pairwise(self.works))
        falls = any(one > two for one, two in itertools.pairwise(self.seconds_at))
        if len(self.works) < 2 or len(self.works) != len(self.seconds_at) or not rising or falls:
            raise InputError(
                f"piecewise model of {len(self.works)} works and {len(self.seconds_at)} times; expected as many of"
                " each, at least 2, works rising and times never falling"
            )
        if not (self.works[0] > 0 and 0 < self.seconds_at[0] <= self.seconds_at[-1] <= MAX_SECONDS):
            raise InputError("piecewise model with a knot out of range; expected work above 0, time above 0 to a day")

    @classmethod
    def of(
        cls,
        n: NDArray[np.float64],
        t: NDArray[np.float64],
        kind: Literal["piecewise", "piecewise_linear"] = "piecewise",
    ) -> Self:
        """The curve nearest to the measured seconds."""
        order = np.lexsort((t, n))
        works, starts = np.unique(n[order], return_index=True)
        groups = [group.tolist() for group in np.split(t[order], starts[1:])]
        seconds = (float(f"{value:.{DIGITS}g}") for value in _isotonic(groups))
        return cls(kind=kind, works=tuple(works.tolist()), seconds_at=tuple(seconds))

    def seconds(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of `n` units of work."""
        works, times = np.array(self.works), np.array(self.seconds_at)
        n = np.maximum(n, works[0])
        if self.kind == "piecewise_linear":
            return _straight(n, works, times)
        inside = np.exp(_straight(np.log(np.minimum(n, works[-1])), np.log(works), np.log(times)))
        slope = min(np.log(times[-1] / times[-2]) / np.log(works[-1] / works[-2]), 1.0)
        beyond: NDArray[np.float64] = inside * np.maximum(n / works[-1], 1.0) ** slope
        return beyond


def _straight(x: NDArray[np.float64], knots: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """`y` at `x` on straight lines between knots and, beyond the last, along the last one."""
    left = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    slope = np.diff(y) / np.diff(knots)
    found: NDArray[np.float64] = y[left] + slope[left] * (x - knots[left])
    return found


def _isotonic(groups: list[list[float]]) -> list[float]:
    """The never falling value a group of least absolute distance to all values.

    Neighbouring groups whose medians are in the wrong order are pooled until none are.
    """
    pools: list[tuple[list[float], int]] = []  # sorted values, number of groups
    for group in groups:
        pools.append((sorted(group), 1))
        while len(pools) > 1 and _median(pools[-2][0]) > _median(pools[-1][0]):
            (left, one), (right, other) = pools[-2:]
            pools[-2:] = [(sorted(left + right), one + other)]
    return [_median(values) for values, count in pools for _ in range(count)]


def _median(ranked: list[float]) -> float:
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2
