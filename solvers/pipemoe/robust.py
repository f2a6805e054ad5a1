"""The pipeline degree that is least wrong whatever the constants are within their intervals.

Legend: R degrees tried, and the rivals each is held against; I ways to pick an arm of each pass; V vertices of the
dual; 4 constants a_a, b_a, a_e, b_e.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..outcome import Objective, Outcome, Status

__all__ = ["RobustDegree", "robust_degree"]

Array = NDArray[np.float64]
Interval = tuple[float, float]
PAIRS = np.array(list(itertools.combinations(range(8), 2)))


@dataclass(frozen=True, slots=True)
class RobustDegree:
    """The degree of the smallest largest regret.

    Parameters
    ----------
    regret_s
        Of every degree tried, `[R]`: at worst, the seconds it takes beyond the degree that would have been best.
    """

    degree: int
    regret_s: Array
    outcome: Outcome


def robust_degree(
    *,
    a_a: Interval,
    b_a: Interval,
    a_e: Interval,
    b_e: Interval,
    n_d: float,
    n_e: float,
    passes: Sequence[float] = (1.0, 2.0),
    max_degree: int = 32,
    full_duplex: bool = False,
) -> RobustDegree:
    """The one degree for all `passes` whose largest regret over a box of constants is smallest.

    Parameters
    ----------
    a_a, b_a, a_e, b_e
        Lowest and highest value each, as for `optimal_degree`.
    n_d, n_e
        Bytes that a rank dispatches, and multiply-adds of its experts.
    passes
        One or two: how many times as long as forward the experts compute in each. (1,) is the forward pass alone, (2,)
        the backward pass alone, (1, 2) one degree for both.
    max_degree
        The largest degree tried, and the largest rival.

    Raises
    ------
    ValueError
        An interval that is empty, negative or not finite; neither one nor two passes; a limit below 1.

    Notes
    -----
    A pass takes max(A(r) . c, B(r) . c), linear arms of the constants c, so regret(r) is the largest, over rivals s and
    arms X of r, of a concave programme over the box, solved by its dual:

        max_c  X(r) . c - sum_p max(A_p(s) . c, B_p(s) . c)
            =  min over l in [0, 1]^p  of  max_c (X(r) - sum_p (l_p A_p(s) + (1 - l_p) B_p(s))) . c              (1)

    The inner maximum over a box is a sum of four convex piecewise linear terms of l, so (1) lies on a vertex: where two
    of the eight lines "coefficient k is 0" and "l_p is 0 or 1" meet. Exact, not sampled; corners would not do.
    """
    started = time.perf_counter()
    box = np.array([a_a, b_a, a_e, b_e], dtype=np.float64)
    if not (np.isfinite(box).all() and (box[:, 0] >= 0).all() and (box[:, 0] <= box[:, 1]).all()):
        raise ValueError(f"intervals {box.tolist()}; expected finite numbers, 0 <= lowest <= highest")
    if not (1 <= len(passes) <= 2 and max_degree >= 1 and min(n_d, n_e, *passes) >= 0):
        raise ValueError(f"passes {passes}, limit {max_degree}, work {n_d}, {n_e}; expected one or two, >= 1, >= 0")
    degrees_R = np.arange(1.0, max_degree + 1)
    arms = [_arms(degrees_R, factor, n_d, n_e, full_duplex) * box[:, 1] for factor in passes]  # seconds at the highest
    arms += [np.zeros_like(arms[0])] * (2 - len(arms))
    low = np.divide(box[:, 0], box[:, 1], out=np.ones(4), where=box[:, 1] > 0)
    regret_s = np.array([_regret(r, arms[0], arms[1], low) for r in range(max_degree)])
    best = int(regret_s.argmin())
    outcome = Outcome.of(
        status=Status.OPTIMAL,
        objective=Objective("regret_s", float(regret_s[best]), "min"),
        bound_kind="exact",
        proven=True,
        started=started,
        backend="moeplan",
    )
    return RobustDegree(best + 1, regret_s, outcome)


def _arms(r: Array, factor: float, n_d: float, n_e: float, full_duplex: bool) -> Array:
    """The coefficients of the constants in both arms of `seconds.pass_arms`, `[R, 2, 4]`."""
    one, none = np.ones_like(r), np.zeros_like(r)
    left = (
        [r + 1, n_d * (1 + 1 / r), factor * one, factor * n_e / r]
        if full_duplex
        else [2 * r, 2 * n_d * one, none, none]
    )
    right = [2 * one, 2 * n_d / r, factor * r, factor * n_e * one]
    return np.stack([np.stack(left, axis=1), np.stack(right, axis=1)], axis=1)


def _regret(r: int, first: Array, second: Array, low: Array) -> float:
    """(1) at its worst over all rivals and arms of degree r + 1."""
    mine_I4 = (first[r][:, None] + second[r][None, :]).reshape(-1, 4)
    over_IR4 = mine_I4[:, None] - (first[:, 1] + second[:, 1])  # at l = 0
    slope_R4, other_R4 = first[:, 0] - first[:, 1], second[:, 0] - second[:, 1]
    l_IRV, m_IRV = _vertices(slope_R4, other_R4, over_IR4)
    left_IRV4 = over_IR4[..., None, :] - l_IRV[..., None] * slope_R4[:, None] - m_IRV[..., None] * other_R4[:, None]
    worst_IRV = np.maximum(left_IRV4, left_IRV4 * low).sum(axis=-1)
    return float(worst_IRV.min(axis=2).max())


def _vertices(slope_R4: Array, other_R4: Array, over_IR4: Array) -> tuple[Array, Array]:
    """Where two of the eight lines u l + v m = w meet, within the square, `[I, R, V]` each."""
    square = np.broadcast_to([1.0, 1.0, 0.0, 0.0], slope_R4.shape)
    u = np.concatenate([slope_R4, square], axis=1)
    v = np.concatenate([other_R4, square[:, ::-1]], axis=1)
    ends = np.broadcast_to([0.0, 1.0, 0.0, 1.0], over_IR4.shape)
    w = np.concatenate([over_IR4, ends], axis=2)
    i, j = PAIRS.T
    with np.errstate(divide="ignore", invalid="ignore"):
        area = u[:, i] * v[:, j] - u[:, j] * v[:, i]
        l_IRV = (w[..., i] * v[:, j] - w[..., j] * v[:, i]) / area
        m_IRV = (u[:, i] * w[..., j] - u[:, j] * w[..., i]) / area
    inside = [np.clip(np.nan_to_num(x), 0, 1) for x in (l_IRV, m_IRV)]  # a point that is no vertex does no harm
    return inside[0], inside[1]
