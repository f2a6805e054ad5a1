"""The pipeline degree that is least wrong whichever of several scenarios comes true: the smallest largest regret.

A scenario is one way that the curves of the stages may lie within the errors of their fits. With t_s(r) the seconds of
degree r under scenario s,

    regret(r) = max_s ( t_s(r) - min_q t_s(q) ),        the degree is the least r of the smallest regret             (1)

over all degrees tried, for curves of any form; lines are a special case.

Legend: S scenarios; R degrees, 1 to the largest allowed.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..outcome import Objective, Outcome, Status

__all__ = ["RobustDegree", "robust_degree"]


@dataclass(frozen=True, slots=True)
class RobustDegree:
    """The degree of the smallest largest regret.

    Parameters
    ----------
    regret_s
        Of every degree, `[R]`: at worst, the seconds it takes beyond the degree that would have been best.
    """

    degree: int
    regret_s: NDArray[np.float64]
    outcome: Outcome


def robust_degree(seconds: ArrayLike) -> RobustDegree:
    """The degree whose largest regret over the scenarios is smallest, the least among equals.

    Parameters
    ----------
    seconds
        Of a layer at every degree under every scenario, in all passes that share the degree, `[S, R]`.

    Raises
    ------
    ValueError
        Seconds that are negative or not finite, or no such table.
    """
    started = time.perf_counter()
    seconds_SR = np.asarray(seconds, dtype=np.float64)
    if seconds_SR.ndim != 2 or not seconds_SR.size or not (np.isfinite(seconds_SR) & (seconds_SR >= 0)).all():
        raise ValueError(f"seconds of shape {seconds_SR.shape}; expected finite numbers >= 0, scenarios by degrees")
    regret_R = (seconds_SR - seconds_SR.min(axis=1, keepdims=True)).max(axis=0)  # (1)
    best = int(regret_R.argmin())
    outcome = Outcome.of(
        status=Status.OPTIMAL,
        objective=Objective("regret_s", float(regret_R[best]), "min"),
        bound_kind="full search",
        proven=True,
        started=started,
        backend="moeplan",
    )
    return RobustDegree(best + 1, regret_R, outcome)
