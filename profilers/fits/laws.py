"""Laws: seconds in closed form, PipeMoE's line over work and LUFFY's attention over a batch of sequences.

Legend: n work (bytes, multiply-adds); t seconds; B sequences; L tokens a sequence; M hidden size; G calls.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..measurement import MAX_SECONDS
from .sizes import Array

SEQUENCES = ("batch", "length", "hidden")  # axes of attention
MIN_SLOPE = 1e-30  # seconds a unit, beyond any hardware: stands for "time does not grow with work"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """t(n) = a + b n: seconds to start, seconds a unit of work."""

    kind: Literal["alpha_beta"] = "alpha_beta"
    a_s: float
    b_s: float

    axes: ClassVar[tuple[str, ...]] = ("work",)
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        if not (0 <= self.a_s < MAX_SECONDS and MIN_SLOPE <= self.b_s < MAX_SECONDS):
            raise InputError(
                f"alpha-beta model with a = {self.a_s} s, b = {self.b_s} s; expected a >= 0, b >= {MIN_SLOPE}, both"
                " below a day"
            )

    @property
    def grows(self) -> bool:
        """Check whether time was seen to grow with work."""
        return self.b_s > MIN_SLOPE

    @classmethod
    def of(cls, n: NDArray[np.float64], t: NDArray[np.float64]) -> Self:
        """The line of least relative error.

        Notes
        -----
        With x_i = 1 / t_i and y_i = n_i / t_i,

            minimise  sum_i (a x_i + b y_i - 1)^2   over a >= 0, b > 0                                   (1)

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
        return cls(a_s=float(free[0] / scale[0]), b_s=max(float(free[1] / scale[1]), MIN_SLOPE))

    def seconds(self, n: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of `n` units of work."""
        return self.a_s + self.b_s * n


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaw:
    """t = c0 + g (G - 1) + p B L M^2 + s B L^2 M: to start, further calls, projections, scores.

    LUFFY's c1 = p M^2 and c2 = s M at one M.
    """

    kind: Literal["attention"] = "attention"
    start_s: float  #: c0, the first call included
    call_s: float | None = None  #: g, at most c0; None: calls were not told apart, and each takes c0
    #: projection_s, score_s: p and s, seconds a multiply-add of each; none negative
    projection_s: float
    score_s: float

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        coefficients = (self.start_s, self.projection_s, self.score_s)
        if not (min(coefficients) >= 0 and MIN_SLOPE <= max(coefficients) < MAX_SECONDS):
            raise InputError(
                f"attention model with coefficients {coefficients}; expected none negative, not all 0, below a day"
            )
        if self.call_s is not None and not 0 <= self.call_s <= self.start_s:
            raise InputError(
                f"attention model with {self.call_s} s for a call; expected 0 to the {self.start_s} s of the first"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of `seconds`, in its order."""
        return SEQUENCES if self.call_s is None else (*SEQUENCES, "calls")

    @property
    def another_s(self) -> float:
        """Seconds of a call after the first."""
        return self.start_s if self.call_s is None else self.call_s

    @classmethod
    def of(cls, batch: Array, length: Array, hidden: Array, calls: Array | None = None, *, t: Array) -> Self:
        """The coefficients of least relative error; `calls` None: one each, whose time is not told from the start's.

        Notes
        -----
        With c0 = b + g, so that no call takes longer than the first,

            minimise  sum_i ((b + g G_i + p B_i L_i M_i^2 + s B_i L_i^2 M_i) / t_i - 1)^2   over b, g, p, s >= 0
        """
        tokens = batch * length * hidden
        terms = [np.ones(len(t)), tokens * hidden, tokens * length, *([] if calls is None else [calls])]
        base_s, projection_s, score_s, *call_s = least_relative(np.stack(terms, axis=1), t)
        return cls(
            start_s=base_s + sum(call_s),
            call_s=call_s[0] if call_s else None,
            projection_s=projection_s,
            score_s=score_s,
        )

    def seconds(self, batch: Array, length: Array, hidden: Array, calls: Array | float = 1.0) -> Array:
        """Seconds of `batch` sequences of `length` tokens, which attend in `calls` calls."""
        tokens = batch * length * hidden
        start_s = self.start_s + self.another_s * (calls - 1)
        return start_s + self.projection_s * tokens * hidden + self.score_s * tokens * length


def least_relative(terms_QC: Array, t: Array) -> list[float]:
    """The coefficients, none negative, with which the terms add up to `t` with the least relative error, `[C]`."""
    from scipy.optimize import nnls

    columns = terms_QC / t[:, None]
    scale = np.linalg.norm(columns, axis=0)
    found, _ = nnls(columns / scale, np.ones(len(t)))
    coefficients: list[float] = (found / scale).tolist()
    return coefficients
