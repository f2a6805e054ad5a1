"""Measurement of one size of a case: the raw samples and their statistics."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ..errors import InputError

Size = Mapping[str, int]
PAIR = ("first", "second")  # ranks in the size of a case that two of them run: names, not amounts
FIGURES = ("min_s", "median_s", "p95_s", "max_s", "median_low_s", "median_high_s")  # of the samples
MIN_SECONDS, MAX_SECONDS = 1e-12, 86_400.0
MAX_INT = 2**63
MIN_SAMPLES, MAX_SAMPLES = 6, 10_000  # 6 are the fewest with a 95 % interval of the median


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The seconds a call takes at one size; each sample is the slowest rank's."""

    size: Size  #: What the case varies, by name: `{"m": 64, "n": 256, "k": 256}`
    work: int  #: Bytes or multiply-adds of a rank (the case's `unit`); what fits are made over
    samples_s: tuple[float, ...]  #: Raw samples in the order taken
    #: min_s, median_s, p95_s, max_s: their percentiles, linearly interpolated
    min_s: float
    median_s: float
    p95_s: float
    max_s: float
    #: median_low_s, median_high_s: the 95 % interval of the median (`median_interval`)
    median_low_s: float
    median_high_s: float

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not (1 <= self.work < MAX_INT and self.size and all(0 <= value < MAX_INT for value in self.size.values())):
            raise InputError("measurement of a size or a work out of range; expected 0 to 2**63 - 1, work from 1 on")
        timed = all(MIN_SECONDS <= sample < MAX_SECONDS for sample in self.samples_s)
        if not (timed and 1 <= len(self.samples_s) <= MAX_SAMPLES):
            raise InputError(f"{len(self.samples_s)} samples; expected 1 to {MAX_SAMPLES:,}, all from 1 ps to a day")
        stored = [getattr(self, name) for name in FIGURES]
        if not np.allclose(stored, _figures(self.samples_s), rtol=1e-9, atol=0):
            raise InputError("percentiles differ from those of the samples; the file was changed after it was written")

    @classmethod
    def of(cls, size: Size, work: int, samples_s: Iterable[float]) -> Self:
        """The measurement that these samples make."""
        samples = tuple(samples_s)
        return cls(size=size, work=work, samples_s=samples, **dict(zip(FIGURES, _figures(samples), strict=True)))

    @property
    def mean_s(self) -> float:
        """Mean of the samples without the fastest and the slowest twentieth, one each at least of three or more.

        What fits go through: a step adds up calls, of which some take longer than the median now and then.
        """
        ascending = sorted(self.samples_s)
        cut = max(1, len(ascending) // 20) if len(ascending) >= 3 else 0
        return float(np.mean(ascending[cut : len(ascending) - cut]))


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median of the samples' distribution; fewer than 6 samples give their range, which is less.

    Notes
    -----
    Of n samples, the number below the median is binomial, whatever their distribution. With the samples sorted,

        P(x_(k) <= median <= x_(n+1-k)) = 1 - 2 P(Bin(n, 1/2) < k),

    and k is the largest for which this is at least 0.95 (k = 1, 94 % and less, for n < 6).
    """
    ascending = sorted(samples)
    k = _order(len(ascending))
    return ascending[k - 1], ascending[-k]


def relative_width(samples: Sequence[float]) -> float:
    """The width of the median's interval over the median; infinite where there are too few samples for one."""
    if len(samples) < MIN_SAMPLES:
        return math.inf
    low, high = median_interval(samples)
    return (high - low) / float(np.median(samples))


@functools.cache
def _order(n: int) -> int:
    """The largest k with P(Bin(n, 1/2) < k) <= 0.025, at least 1."""
    k, ways, tail = 0, 1, 1  # ways = C(n, k), tail = C(n, 0) + .. + C(n, k)
    while 40 * tail <= 2**n:
        k += 1
        ways = ways * (n - k + 1) // k
        tail += ways
    return max(1, k)


def _figures(samples_s: tuple[float, ...]) -> list[float]:
    percentiles: list[float] = np.percentile(samples_s, (0, 50, 95, 100)).tolist()
    return [*percentiles, *median_interval(samples_s)]
