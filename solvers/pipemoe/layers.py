"""The pipeline degrees of many layers at once: `optimal_degree`, vectorised.

For lines, and degrees without a small limit: up to some hundred a search of all of them is as fast, and asks no lines
of the stages. The planner searches.

Legend: L MoE layers; C candidates.
"""

import time

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..outcome import Objective, Outcome, Status
from .degree import HIGHEST
from .result import LayerDegrees
from .seconds import Arms, pass_arms

__all__ = ["optimal_degrees"]

Seconds = NDArray[np.float64]
Count = NDArray[np.int64]


def optimal_degrees(
    *,
    a_a: ArrayLike,
    b_a: ArrayLike,
    a_e: ArrayLike,
    b_e: ArrayLike,
    n_d: ArrayLike,
    n_e: ArrayLike,
    backward: float = 2.0,
    max_degree: int | None = None,
    full_duplex: bool = False,
) -> LayerDegrees:
    """The best pipeline degrees of L layers.

    Parameters
    ----------
    a_a, b_a, a_e, b_e, n_d, n_e
        As for `optimal_degree`, numbers or `[L]`, broadcast together.
    backward, max_degree, full_duplex
        As for `optimal_degree`, for all layers.

    Raises
    ------
    ValueError
        As for `optimal_degree`; shapes that do not broadcast to `[L]`.
    """
    started = time.perf_counter()
    given = (np.asarray(column, dtype=np.float64) for column in (a_a, b_a, a_e, b_e, n_d, n_e))
    columns = [np.atleast_1d(column) for column in np.broadcast_arrays(*given)]
    with np.errstate(over="ignore", invalid="ignore"):
        there, back = _passes(*columns, backward=backward, full_duplex=full_duplex)
    _check([*columns, *there, *back], backward, max_degree)
    highest = max_degree or HIGHEST
    forward, backward_L = _lowest(there, highest), _lowest(back, highest)
    joint = _lowest_of_both(there, back, np.minimum(forward, backward_L), np.maximum(forward, backward_L))
    forward_s, backward_s = _seconds(there, forward), _seconds(back, backward_L)
    outcome = Outcome.of(
        status=Status.OPTIMAL,
        objective=Objective("layers_s", float((forward_s + backward_s).sum()), "min"),
        bound_kind="exact",
        proven=True,
        started=started,
        backend="moeplan",
    )
    joint_s = _seconds(there, joint) + _seconds(back, joint)
    return LayerDegrees(forward, backward_L, joint, forward_s, backward_s, joint_s, outcome)


def _passes(
    a_a: Seconds,
    b_a: Seconds,
    a_e: Seconds,
    b_e: Seconds,
    n_d: Seconds,
    n_e: Seconds,
    *,
    backward: float,
    full_duplex: bool,
) -> tuple[Arms[Seconds], Arms[Seconds]]:
    there = pass_arms(a_a, b_a, a_e, b_e, n_d, n_e, full_duplex=full_duplex)
    back = pass_arms(a_a, b_a, backward * a_e, backward * b_e, n_d, n_e, full_duplex=full_duplex)
    return there, back if backward else Arms(*np.zeros((6, len(a_a))))


def _check(columns: list[Seconds], backward: float, max_degree: int | None) -> None:
    if columns[0].ndim != 1 or not all(np.isfinite(column).all() and (column >= 0).all() for column in columns):
        raise ValueError(f"constants of shape {columns[0].shape}; expected finite numbers >= 0, one a layer")
    if not backward >= 0 or (max_degree is not None and max_degree < 1):
        raise ValueError(f"backward {backward}, limit {max_degree}; expected a factor >= 0 and a limit >= 1")
    if max_degree is None and ((columns[0] == 0) & (columns[2] == 0)).any():
        raise ValueError("nothing takes time to start, so that more chunks are never worse; give max_degree")


def _seconds(arms: Arms[Seconds], r: Count) -> Seconds:
    p1, q1, s1, p2, q2, s2 = arms
    return np.maximum(p1 + q1 * r + s1 / r, p2 + q2 * r + s2 / r)


def _lowest(arms: Arms[Seconds], highest: int) -> Count:
    """The degree of the fewest seconds of each layer, `[L]`."""
    points_CL = np.nan_to_num(_turning_points(arms), nan=1.0, posinf=highest)
    below_CL = np.floor(np.clip(points_CL, 1, highest)).astype(np.int64)
    candidates_CL = np.sort(np.concatenate([below_CL, np.minimum(below_CL + 1, highest)]), axis=0)
    best_L = _seconds(arms, candidates_CL).argmin(axis=0)  # the first among equals is the smallest
    lowest_L: Count = np.take_along_axis(candidates_CL, best_L[None], axis=0)[0]
    return lowest_L


def _turning_points(arms: Arms[Seconds]) -> NDArray[np.float64]:
    """`seconds.turning_points` of each layer, `[C, L]`; NaN where one is missing."""
    p1, q1, s1, p2, q2, s2 = arms
    a, b, c = q1 - q2, p1 - p2, s1 - s2
    with np.errstate(divide="ignore", invalid="ignore"):
        half = -(b + np.copysign(np.sqrt(b * b - 4 * a * c), b)) / 2
        return np.stack([np.sqrt(s1 / q1), np.sqrt(s2 / q2), half / a, c / half])


def _lowest_of_both(one: Arms[Seconds], other: Arms[Seconds], low: Count, high: Count) -> Count:
    """The degree of the fewest seconds of both passes, each layer's between `low` and `high`."""
    while (low < high).any():
        middle = (low + high) // 2
        here = _seconds(one, middle) + _seconds(other, middle)
        falls = _seconds(one, middle + 1) + _seconds(other, middle + 1) < here
        low, high = np.where(falls & (low < high), middle + 1, low), np.where(falls, high, middle)
    return low
