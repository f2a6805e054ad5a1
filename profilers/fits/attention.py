"""The seconds of attention over a batch of sequences (LUFFY's cost model).

Legend: B sequences; L tokens a sequence; M hidden size.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..measurement import MAX_SECONDS
from .alpha_beta import MIN_SLOPE

__all__ = ["AttentionLaw"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaw:
    """t = c0 + p B L M^2 + s B L^2 M: to start, projections, scores; LUFFY's c1 = p M^2 and c2 = s M at one M.

    Parameters
    ----------
    start_s
        c0.
    projection_s, score_s
        p and s, seconds a multiply-add of each; none negative.
    """

    kind: Literal["attention"] = "attention"
    start_s: float
    projection_s: float
    score_s: float

    axes: ClassVar[tuple[str, ...]] = ("batch", "length", "hidden")
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        coefficients = (self.start_s, self.projection_s, self.score_s)
        if not (min(coefficients) >= 0 and MIN_SLOPE <= max(coefficients) < MAX_SECONDS):
            raise InputError(
                f"attention model with coefficients {coefficients}; expected none negative, not all 0, below a day"
            )

    @classmethod
    def of(cls, batch: Array, length: Array, hidden: Array, *, t: Array) -> Self:
        """The coefficients of least relative error.

        Notes
        -----
            minimise  sum_i ((c0 + p B_i L_i M_i^2 + s B_i L_i^2 M_i) / t_i - 1)^2   over c0, p, s >= 0
        """
        from scipy.optimize import nnls

        terms = np.stack([np.ones(len(t)), batch * length * hidden**2, batch * length**2 * hidden], axis=1)
        columns = terms / t[:, None]
        scale = np.linalg.norm(columns, axis=0)
        found, _ = nnls(columns / scale, np.ones(len(t)))
        start_s, projection_s, score_s = (found / scale).tolist()
        return cls(start_s=start_s, projection_s=projection_s, score_s=score_s)

    def seconds(self, batch: Array, length: Array, hidden: Array) -> Array:
        """Seconds of `batch` sequences of `length` tokens."""
        tokens = batch * length * hidden
        return self.start_s + self.projection_s * tokens * hidden + self.score_s * tokens * length
