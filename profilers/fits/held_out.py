"""Errors of a model on sizes that it was not fitted to, and which sizes are kept from it.

Legend: S sizes; A axes; F folds.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from .sizes import Sizes, distinct

__all__ = ["HeldOut", "folds", "interval"]

MAX_LISTED = 32
NUM_FOLDS = 5
SEED = 0
MIN_ORDERED = 39  # ratios, below which no two of them hold 95 % between them


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The error |model - t| / t of a model on sizes that it was not fitted to.

    Parameters
    ----------
    num_sizes
        How many sizes were held out.
    median_error, p95_error, worst_error
        Over these.
    sizes, errors
        The worst of them, at most 32, worst first: the values along the fit's axes, and the error.
    """

    num_sizes: int
    median_error: float
    p95_error: float
    worst_error: float
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


def folds(sizes: Sizes) -> list[NDArray[np.bool_]]:
    """Which sizes to hold out, `[S]` in each of F folds; no size is in two.

    Notes
    -----
    Along one axis: every second size inside the range, first the odd, then the even ones; the ends are never held out.
    Along several: the sizes that differ only along the curve's axis (all m of an (n, k)) are one group and are held out
    together, the groups in five folds drawn at random with a fixed seed. Where there are fewer than five groups: every
    second size by work, as along one axis.
    """
    first, groups = distinct([np.zeros(len(sizes.works)), *sizes.along(sizes.varying[1:])])
    num_groups = len(first)
    if num_groups >= NUM_FOLDS:
        fold_of_group = np.random.default_rng(SEED).permutation(num_groups) % NUM_FOLDS
        return [fold_of_group[groups] == fold for fold in range(NUM_FOLDS)]
    place = np.unique(sizes.works, return_inverse=True)[1]
    inside = (place > 0) & (place < place.max())
    found = [inside & (place % 2 == parity) for parity in (1, 0)]
    return [held for held in found if held.any()]
