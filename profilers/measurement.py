"""What was measured of one size of a case: the raw samples and what they come to."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from ..errors import InputError

__all__ = ["Measurement", "Size"]

Size = Mapping[str, int]
MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The seconds a call takes at one size; each sample is the slowest rank's.

    Parameters
    ----------
    size
        What the case varies, by name: `{"m": 64, "n": 256, "k": 256}`.
    work
        Bytes or multiply-adds of a rank (the case's `unit`); what fits are made over.
    samples_s
        Raw samples in the order taken.
    min_s, median_s, p95_s, max_s
        Their percentiles, linearly interpolated.
    """

    size: Size
    work: int
    samples_s: tuple[float, ...]
    min_s: float
    median_s: float
    p95_s: float
    max_s: float

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if self.work < 1 or not self.size or min(self.size.values()) < 0:
            raise InputError(f"measurement of {self.work} units of work; expected at least 1 and sizes of at least 0")
        if not self.samples_s or not all(0 < sample < MAX_SECONDS for sample in self.samples_s):
            raise InputError(f"{len(self.samples_s)} samples; expected at least one, all above 0 s and below a day")
        told = (self.min_s, self.median_s, self.p95_s, self.max_s)
        if not all(map(_close, told, _percentiles(self.samples_s))):
            raise InputError("percentiles differ from those of the samples; the file was changed after it was written")

    @classmethod
    def of(cls, size: Size, work: int, samples_s: Iterable[float]) -> Self:
        """The measurement that these samples make."""
        samples = tuple(samples_s)
        low, median, p95, high = _percentiles(samples)
        return cls(size=size, work=work, samples_s=samples, min_s=low, median_s=median, p95_s=p95, max_s=high)


def _percentiles(samples_s: tuple[float, ...]) -> list[float]:
    found: list[float] = np.percentile(samples_s, (0, 50, 95, 100)).tolist()
    return found


def _close(told: float, found: float) -> bool:
    return math.isclose(told, found, rel_tol=1e-9)
