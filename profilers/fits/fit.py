"""A fit: the model of a series that predicts unseen sizes best, with its errors on held-out sizes.

Legend: S sizes; A axes.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from ...errors import InputError, UsageError
from ..measurement import MAX_INT, MAX_SECONDS
from .experts import ExpertSurface
from .laws import AlphaBeta, AttentionLaw
from .piecewise import Piecewise
from .roofline import Roofline
from .surface import Surface

MAX_LISTED = 32
MIN_ORDERED = 39  # ratios, below which no two of them hold 95 % between them
MAX_AXES = 16
MAX_PREDICTED_S = 1e30  # beyond any use; sums of these still are numbers

Model = Annotated[
    AlphaBeta | Piecewise | AttentionLaw | Surface | ExpertSurface | Roofline, Field(discriminator="kind")
]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds at one or many sizes; arrays of one shape."""

    seconds: NDArray[np.float64]  #: Of the fitted model
    #: low, high: where sizes held out from the fit lay around it: 95 % of them, or the range of fewer than 39
    #: (`interval`); equal to `seconds` where none could be held out
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]  #: Whether each size lies outside those measured, along an axis or in work


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The error |model - t| / t of a model on sizes that it was not fitted to."""

    num_sizes: int  #: How many sizes were held out
    #: median_error, p95_error, worst_error: over these
    median_error: float
    p95_error: float
    worst_error: float
    #: sizes, errors: the worst of them, at most 32, worst first: the values along the fit's axes, and the error
    sizes: tuple[tuple[int, ...], ...]
    errors: tuple[float, ...]

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not 0 <= self.median_error <= self.p95_error <= self.worst_error:
            raise InputError(
                f"held-out errors {self.median_error} (median), {self.p95_error} (p95) and {self.worst_error} (worst);"
                " expected 0 <= median <= p95 <= worst"
            )
        listed = min(self.num_sizes, MAX_LISTED)
        if not (0 < listed == len(self.sizes) == len(self.errors) and max(self.errors) == self.worst_error):
            raise InputError(
                f"held-out sizes: {len(self.sizes)} listed with {len(self.errors)} errors, of {self.num_sizes};"
                f" expected the worst {MAX_LISTED}, or all, of at least one"
            )

    @property
    def interval(self) -> str:
        """Meaning of an interval from so many held-out ratios, in words."""
        if self.num_sizes < MIN_ORDERED:
            return f"range of {self.num_sizes} held-out sizes"
        return f"95 % of unseen sizes, by {self.num_sizes} held out"

    @classmethod
    def of(cls, points_SA: NDArray[np.int64], errors_S: NDArray[np.float64]) -> Self:
        """The summary of an error a size."""
        median, p95, worst = np.percentile(errors_S, (50, 95, 100)).tolist()
        listed = np.argsort(-errors_S, kind="stable")[:MAX_LISTED]
        return cls(
            num_sizes=len(errors_S),
            median_error=median,
            p95_error=p95,
            worst_error=worst,
            sizes=tuple(map(tuple, points_SA[listed].tolist())),
            errors=tuple(errors_S[listed].tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Models fitted to the sizes of a series."""

    axes: tuple[str, ...]  #: What names a size: ("m", "n", "k")
    model: Model  #: The kind with the least median error on held-out sizes, fitted to all sizes
    alpha_beta: AlphaBeta  #: The line over work of all sizes, whatever was chosen: closed forms need it
    #: Of every kind tried, its errors on sizes that it was not fitted to (see `folds`); empty where there are too few
    #: sizes to hold any out. They are errors of the protocol: `model` itself has seen every size. The choice among a
    #: handful of kinds by these errors is itself a mild selection.
    held_out: Mapping[str, HeldOut]
    #: low_factor, high_factor: the `interval` of measured / predicted seconds over the held-out sizes of the chosen
    #: kind
    low_factor: float = 1.0
    high_factor: float = 1.0
    measured: Mapping[str, tuple[int, int]]  #: Axis to its least and largest measured value
    #: The least and the largest work measured: grids leave out the corner where all axes are large. None in profiles of
    #: earlier versions.
    works: tuple[float, float] | None = None
    #: The smallest measured median: nothing is predicted below it, so that no size is faster than one call costs. None
    #: in profiles of earlier versions.
    least_s: float | None = None

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not 1 <= len(set(self.axes)) == len(self.axes) <= MAX_AXES:
            raise InputError(f"fit over {len(self.axes)} axes; expected 1 to {MAX_AXES}, each once")
        if set(self.measured) != set(self.axes) or not set(self.model.axes) <= {*self.axes, "work"}:
            raise InputError(f"fit over {len(self.axes)} axes; expected those of its model, a measured range for each")
        if not all(0 <= value < MAX_INT for value in self._integers):
            raise InputError("fit with a size out of range; expected integers from 0 to 2**63 - 1")
        if any(low > high for low, high in self._ranges.values()) or not (0 < self.low_factor <= 1 <= self.high_factor):
            raise InputError("fit with a range or an interval that ends before it starts; expected low <= high")
        if self.least_s is not None and not 0 < self.least_s <= MAX_SECONDS:
            raise InputError(f"fit with a least time of {self.least_s} s; expected above 0 to a day")
        if any(len(size) != len(self.axes) for held in self.held_out.values() for size in held.sizes):
            raise InputError(f"fit with a held-out size of another length than its {len(self.axes)} axes")

    def predict(self, size: Mapping[str, ArrayLike], work: ArrayLike) -> Prediction:
        """Seconds at one or many sizes.

        Parameters
        ----------
        size
            Axis to values; scalars and arrays that broadcast.
        work
            Units of work at these sizes.

        Raises
        ------
        UsageError
            An axis is missing or unknown.
        InputError
            The model gives no number of seconds that means anything.
        """
        self.check_axes(size)
        given = np.broadcast_arrays(*(np.asarray(column, dtype=np.float64) for column in (*size.values(), work)))
        columns = dict(zip((*size, "work"), given, strict=True))
        with np.errstate(all="ignore"):  # what comes of it is looked at
            free = np.asarray(self.model.seconds(*(columns[axis] for axis in self.model.axes)))
            seconds = np.asarray(np.maximum(free, self.least_s or 0.0))
            high = np.asarray(seconds * self.high_factor)
        if not ((free >= 0) & (high < MAX_PREDICTED_S)).all():
            raise InputError(
                f"the {self.model.kind} fit over {', '.join(self.axes)} predicts no time that means anything; expected"
                f" 0 to {MAX_PREDICTED_S:g} s: measure again, or read the profile from another file"
            )
        outside = [(columns[axis] < low) | (columns[axis] > high) for axis, (low, high) in self._ranges.items()]
        return Prediction(
            seconds=seconds,
            low=np.asarray(seconds * self.low_factor),
            high=high,
            extrapolated=np.asarray(np.any(outside, axis=0)),
        )

    @property
    def _integers(self) -> Iterator[int]:
        """All sizes that the fit names."""
        for held in self.held_out.values():
            yield held.num_sizes
            yield from itertools.chain(*held.sizes)
        yield from itertools.chain(*self.measured.values())

    @property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        return {**self.measured} if self.works is None else {**self.measured, "work": self.works}

    def check_axes(self, size: Mapping[str, object]) -> None:
        """Refuse a size that lacks an axis or has another."""
        if set(size) != set(self.axes):
            raise UsageError(f"a size of {', '.join(sorted(size)) or 'nothing'}; expected {', '.join(self.axes)}")


def interval(ratios_S: NDArray[np.float64]) -> tuple[float, float]:
    """The least and the greatest of measured / predicted seconds to expect of an unseen size.

    Notes
    -----
    Of n ratios in order, r_(i) to r_(j) hold the next one of their kind with probability (j - i) / (n + 1). With
    k = floor((n + 1) / 40), at least 1 from n = 39 on,

        r_(k)  to  r_(n + 1 - k)    hold at least 95 %,                                                 (1)

    widened to hold 1. Fewer than 39 give their range, made symmetric: too fast was as likely as too slow,

        1 / w  to  w,    w = max over i of max(r_i, 1 / r_i),                                           (2)

    which holds n / (n + 1) of them: 3 in 4 by 3 sizes, 7 in 8 by 7.
    """
    if not len(ratios_S):
        return 1.0, 1.0
    if len(ratios_S) < MIN_ORDERED:
        widest = float(np.maximum(ratios_S, 1 / ratios_S).max())  # (2)
        return 1 / widest, widest
    k = (len(ratios_S) + 1) // 40
    ascending = np.sort(ratios_S)
    return min(float(ascending[k - 1]), 1.0), max(float(ascending[-k]), 1.0)  # (1)
