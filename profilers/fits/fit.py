"""Fitted models of seconds over work, with their error on sizes they have not seen.

Legend: n work (bytes, multiply-adds); t seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError

__all__ = ["MIN_SLOPE", "AlphaBeta", "Fit", "HeldOut", "alpha_beta", "fit"]

MIN_SLOPE = 1e-30  # seconds a unit, beyond any hardware: stands for "time does not grow with work"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """t(n) = a + b n: seconds to start, seconds a unit of work."""

    kind: Literal["alpha_beta"] = "alpha_beta"
    a_s: float
    b_s: float

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not (self.a_s >= 0 and self.b_s > 0):
            raise InputError(f"alpha-beta model with a = {self.a_s} s, b = {self.b_s} s; expected a >= 0 and b > 0")

    def seconds(self, n: float) -> float:
        """Seconds of `n` units of work."""
        return self.a_s + self.b_s * n


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The error |model - t| / t of a model on sizes that it was not fitted to.

    Parameters
    ----------
    works
        The sizes held out, as work.
    """

    works: tuple[int, ...]
    median_error: float
    worst_error: float

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not (self.works and 0 <= self.median_error <= self.worst_error):
            raise InputError(
                f"held-out errors {self.median_error} (median) and {self.worst_error} (worst) on {len(self.works)}"
                " sizes; expected 0 <= median <= worst on at least one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model fitted to some sizes and tried on the others (None where there are too few to hold any out)."""

    model: AlphaBeta
    held_out: HeldOut | None

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def seconds(self, n: float) -> float:
        """Seconds of `n` units of work."""
        return self.model.seconds(n)


def fit(works: Sequence[int], seconds: Sequence[float]) -> Fit | None:
    """Alpha-beta of all sizes but every second one inside the range, and its error on these; None for under two sizes.

    Parameters
    ----------
    works, seconds
        The work and the median seconds of each measurement; measurements of equal work are one size, and are fitted or
        held out together.

    Notes
    -----
    What is reported is what was tried: the model is not refitted on the held-out sizes.
    """
    n, t = np.array(works, dtype=np.float64), np.array(seconds, dtype=np.float64)
    sizes = np.unique(n)
    if len(sizes) < 2:
        return None
    unseen = np.isin(n, sizes[1:-1:2])
    model = alpha_beta(n[~unseen], t[~unseen])
    if not unseen.any():
        return Fit(model=model, held_out=None)
    predicted = np.array([model.seconds(work) for work in n[unseen]])
    error = np.abs(predicted - t[unseen]) / t[unseen]
    return Fit(
        model=model,
        held_out=HeldOut(
            works=tuple(sizes[1:-1:2].astype(np.int64).tolist()),
            median_error=float(np.median(error)),
            worst_error=float(error.max()),
        ),
    )


def alpha_beta(n: NDArray[np.float64], t: NDArray[np.float64]) -> AlphaBeta:
    """The line of least relative error.

    Notes
    -----
    With x_i = 1 / t_i and y_i = n_i / t_i,

        minimise  sum_i (a x_i + b y_i - 1)^2   over a >= 0, b > 0                                       (1)

    Two variables: either the free minimum is feasible, or one of them is 0 and the other x.1 / x.x or y.1 / y.y.
    """
    x, y = 1 / t, n / t
    scale = np.linalg.norm(x), np.linalg.norm(y)  # a is seconds, b seconds a byte: far apart
    columns = np.stack([x / scale[0], y / scale[1]], axis=1)
    free, *_ = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)  # (1)
    if free[0] < 0:
        free = np.array([0.0, columns[:, 1].sum()])
    elif free[1] < 0:
        free = np.array([columns[:, 0].sum(), 0.0])
    return AlphaBeta(a_s=float(free[0] / scale[0]), b_s=max(float(free[1] / scale[1]), MIN_SLOPE))
