"""The choice that is least wrong whichever of several scenarios comes true: the smallest largest regret.

A scenario is one way that the curves of the stages may lie within the errors of their fits; a choice is the pipeline
degrees of a layer. With t_s(p) the seconds of choice p under scenario s,

    regret(p) = max_s ( t_s(p) - min_q t_s(q) ),        the first p of the smallest regret                          (1)

over all choices, for curves of any form; lines are a special case.

Legend: S scenarios; P choices, the smallest degrees first.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..arrays import Floats
from ..outcome import Objective, Outcome


@dataclass(frozen=True, slots=True)
class RobustChoice:
    """The choice of the smallest largest regret."""

    choice: int  #: Which of the P, from 0
    regret_s: Floats  #: Of every choice, `[P]`: at worst, the seconds it takes beyond the one that would have been best
    outcome: Outcome


def robust_choice(seconds: ArrayLike) -> RobustChoice:
    """The choice whose largest regret over the scenarios is smallest, the first among equals.

    Parameters
    ----------
    seconds
        Of a layer in all its passes, under every scenario, `[S, P]`.

    Raises
    ------
    ValueError
        Seconds that are negative or not finite, or no such table.
    """
    started = time.perf_counter()
    seconds_SP = np.asarray(seconds, dtype=np.float64)
    if seconds_SP.ndim != 2 or not seconds_SP.size or not (np.isfinite(seconds_SP) & (seconds_SP >= 0)).all():
        raise ValueError(f"seconds of shape {seconds_SP.shape}; expected finite numbers >= 0, scenarios by choices")
    regret_P = (seconds_SP - seconds_SP.min(axis=1, keepdims=True)).max(axis=0)  # (1)
    best = int(regret_P.argmin())
    outcome = Outcome.of(
        objective=Objective("regret_s", float(regret_P[best]), "min"),
        bound_kind="full search",
        proven=True,
        started=started,
    )
    return RobustChoice(best, regret_P, outcome)
