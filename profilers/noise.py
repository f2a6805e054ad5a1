"""The noise of a run: how far its figures may be trusted, from the figures themselves."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ..errors import InputError
from .measurement import Measurement, relative_width

__all__ = ["Noise"]

WIDE = 0.20  # relative width of a median's interval
MOST_WIDE = 0.20  # share of sizes
MOST_DRIFT = 2.0  # of the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of the machine during a run.

    Parameters
    ----------
    sizes, wide
        Sizes measured, and those whose median has a 95 % interval wider than 20 % of it.
    reference_s
        Seconds of a small matrix product of fixed size, the best of three on the slowest rank, before each size.
    """

    sizes: int
    wide: int
    reference_s: tuple[float, ...] = ()

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not (0 <= self.wide <= self.sizes and all(second > 0 for second in self.reference_s)):
            raise InputError(f"noise of {self.wide} wide sizes of {self.sizes}; expected at most all, and seconds > 0")

    @classmethod
    def of(cls, measurements: Iterable[Measurement], reference_s: Iterable[float]) -> Self:
        """The noise of these measurements."""
        widths = [relative_width(one.samples_s) for one in measurements]
        return cls(sizes=len(widths), wide=sum(width > WIDE for width in widths), reference_s=tuple(reference_s))

    @property
    def drift(self) -> float:
        """The reference's 90th percentile over its 10th; 1 where it took the same time throughout."""
        if not self.reference_s:
            return 1.0
        low, high = np.percentile(self.reference_s, (10, 90)).tolist()
        return float(high / low)

    @property
    def noisy(self) -> bool:
        """Whether more than a fifth of the sizes are wide, or the reference drifted by more than 2."""
        return self.wide > MOST_WIDE * self.sizes or self.drift > MOST_DRIFT

    def __str__(self) -> str:
        verdict = "this machine is NOISY" if self.noisy else "quiet enough"
        share = math.ceil(100 * self.wide / max(1, self.sizes))
        return (
            f"{verdict}: the median of {self.wide} of {self.sizes} sizes ({share} %) is known no better than to 20 %;"
            f" a fixed reference varied {self.drift:.2f} times (10th to 90th percentile)"
        )
