"""The pipeline degrees of many layers at once: `optimal_degree`, vectorised, and a search under measured curves.

The closed form is for lines, and degrees without a small limit: up to some hundred a search of all of them is as fast,
and asks no lines of the stages. The planner searches: its curves are whatever was measured, and passes are not alone: a
layer is computed in the pieces that both cut, each a call of the experts. With p = max(f, b) pieces, a chunk of a pass
of degree r has

    t_experts = p / r  t_e(1 / p)                                                                                    (1)

A backward chunk takes back what whole calls of the experts made forward, so a layer of degrees f and b is computed in
pieces cut at the boundaries of both, f + b - gcd(f, b) of them, each a call with its start-up. Where one degree divides
the other these are max(f, b), as few as either pass has alone; other pairs have more.

Legend: L MoE layers; C candidates; R degrees, 1 to the largest allowed; P pairs of degrees.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from ..arrays import Floats, Ints
from ..outcome import Objective, Outcome
from .degree import HIGHEST, LayerDegrees
from .seconds import Arms, layer_seconds, pass_arms

Curve = Callable[[Floats], ArrayLike]  # work of each call -> its seconds


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
        objective=Objective("layers_s", float((forward_s + backward_s).sum()), "min"),
        bound_kind="exact",
        proven=True,
        started=started,
    )
    joint_s = _seconds(there, joint) + _seconds(back, joint)
    return LayerDegrees(forward, backward_L, joint, forward_s, backward_s, joint_s, outcome)


def _passes(
    a_a: Floats, b_a: Floats, a_e: Floats, b_e: Floats, n_d: Floats, n_e: Floats, *, backward: float, full_duplex: bool
) -> tuple[Arms[Floats], Arms[Floats]]:
    there = pass_arms(a_a, b_a, a_e, b_e, n_d, n_e, full_duplex=full_duplex)
    back = pass_arms(a_a, b_a, backward * a_e, backward * b_e, n_d, n_e, full_duplex=full_duplex)
    return there, back if backward else Arms(*np.zeros((6, len(a_a))))


def _check(columns: list[Floats], backward: float, max_degree: int | None) -> None:
    if columns[0].ndim != 1 or not all(np.isfinite(column).all() and (column >= 0).all() for column in columns):
        raise ValueError(f"constants of shape {columns[0].shape}; expected finite numbers >= 0, one a layer")
    if not backward >= 0 or (max_degree is not None and max_degree < 1):
        raise ValueError(f"backward {backward}, limit {max_degree}; expected a factor >= 0 and a limit >= 1")
    if max_degree is None and ((columns[0] == 0) & (columns[2] == 0)).any():
        raise ValueError("nothing takes time to start, so that more chunks are never worse; give max_degree")


def _seconds(arms: Arms[Floats], r: Ints) -> Floats:
    p1, q1, s1, p2, q2, s2 = arms
    return np.maximum(p1 + q1 * r + s1 / r, p2 + q2 * r + s2 / r)


def _lowest(arms: Arms[Floats], highest: int) -> Ints:
    """The degree of the fewest seconds of each layer, `[L]`."""
    points_CL = np.nan_to_num(_turning_points(arms), nan=1.0, posinf=highest)
    below_CL = np.floor(np.clip(points_CL, 1, highest)).astype(np.int64)
    candidates_CL = np.sort(np.concatenate([below_CL, np.minimum(below_CL + 1, highest)]), axis=0)
    best_L = _seconds(arms, candidates_CL).argmin(axis=0)  # the first among equals is the smallest
    lowest_L: Ints = np.take_along_axis(candidates_CL, best_L[None], axis=0)[0]
    return lowest_L


def _turning_points(arms: Arms[Floats]) -> Floats:
    """`seconds.turning_points` of each layer, `[C, L]`; NaN where one is missing."""
    p1, q1, s1, p2, q2, s2 = arms
    a, b, c = q1 - q2, p1 - p2, s1 - s2
    with np.errstate(divide="ignore", invalid="ignore"):
        half = -(b + np.copysign(np.sqrt(b * b - 4 * a * c), b)) / 2
        return np.stack([np.sqrt(s1 / q1), np.sqrt(s2 / q2), half / a, c / half])


def _lowest_of_both(one: Arms[Floats], other: Arms[Floats], low: Ints, high: Ints) -> Ints:
    """The degree of the fewest seconds of both passes, each layer's between `low` and `high`."""
    while (low < high).any():
        middle = (low + high) // 2
        here = _seconds(one, middle) + _seconds(other, middle)
        falls = _seconds(one, middle + 1) + _seconds(other, middle + 1) < here
        low, high = np.where(falls & (low < high), middle + 1, low), np.where(falls, high, middle)
    return low


def measured_degrees(
    dispatch: Curve,
    experts: Curve,
    *,
    n_d: ArrayLike,
    n_e: ArrayLike,
    combine: Curve | None = None,
    backward: float = 2.0,
    max_degree: int = 64,
    capacity: int | None = None,
    full_duplex: bool = False,
) -> LayerDegrees:
    """The best pipeline degrees of L layers whose stages take what `dispatch` and `experts` say, lines or not.

    One degree divides the other; the first of `nested_pairs` are taken among equals.

    Parameters
    ----------
    dispatch, experts
        Floats of an all-to-all by its bytes, and of the experts by their multiply-adds.
    n_d, n_e
        Bytes that a rank dispatches, and multiply-adds of its experts, numbers or `[L]`.
    combine
        Floats of the way back by the bytes dispatched; None: as `dispatch`.
    backward
        How many times as long as forward the experts compute backward; 0 where there is no backward pass.
    max_degree
        The largest degree tried.
    capacity
        Tokens of an expert, padded to a multiple of p, so that a call has ceil(capacity / p) of them and p <= capacity;
        None: chunks of exactly 1 / r.

    Raises
    ------
    ValueError
        A limit or a capacity below 1; curves that give negative seconds, or none.
    """
    if max_degree < 1 or (capacity is not None and capacity < 1):
        raise ValueError(f"limit {max_degree}, capacity {capacity}; expected at least 1")
    started, pairs = time.perf_counter(), nested_pairs(min(max_degree, capacity or max_degree))
    pairs = pairs if backward else pairs[pairs[:, 0] == pairs[:, 1]]
    pieces_P1 = pairs.max(axis=1)[:, None]
    share_P1 = -(-capacity // pieces_P1) / capacity if capacity else 1 / pieces_P1

    def taken(degree_P1: Ints, first: Curve, factor: float, last: Curve) -> Floats:
        calls_P1 = pieces_P1 / degree_P1
        sent_PL, called_PL = calls_P1 * share_P1 * np.asarray(n_d), share_P1 * np.asarray(n_e)
        first_PL, call_PL, last_PL = _checked(first(sent_PL)), _checked(experts(called_PL)), _checked(last(sent_PL))
        return layer_seconds(degree_P1, first_PL, factor * calls_P1 * call_PL, last_PL, full_duplex=full_duplex)  # (1)

    back = dispatch if combine is None else combine
    forward_PL = taken(pairs[:, :1], dispatch, 1.0, back)
    backward_PL = taken(pairs[:, 1:], back, backward, dispatch) if backward else np.zeros_like(forward_PL)
    return _best(pairs, forward_PL, backward_PL, started)


def _best(pairs: Ints, forward_PL: Floats, backward_PL: Floats, started: float) -> LayerDegrees:
    """The first of the fastest pairs of every layer, and the best that are one degree for both passes."""
    both_PL = forward_PL + backward_PL
    best_L, layers = both_PL.argmin(axis=0), np.arange(both_PL.shape[1])
    alike_RL = both_PL[pairs[:, 0] == pairs[:, 1]]
    forward_L, backward_L = pairs[best_L].T
    outcome = Outcome.of(
        objective=Objective("layers_s", float(both_PL[best_L, layers].sum()), "min"),
        bound_kind="full search",
        proven=True,
        started=started,
    )
    return LayerDegrees(
        forward=forward_L,
        backward=backward_L if backward_PL.any() else np.ones_like(backward_L),
        joint=alike_RL.argmin(axis=0) + 1,
        forward_s=forward_PL[best_L, layers],
        backward_s=backward_PL[best_L, layers],
        joint_s=alike_RL.min(axis=0),
        outcome=outcome,
    )


def _checked(seconds: ArrayLike) -> Floats:
    seconds_PL = np.asarray(seconds, dtype=np.float64)
    if seconds_PL.ndim != 2 or not seconds_PL.size or not (np.isfinite(seconds_PL) & (seconds_PL >= 0)).all():
        raise ValueError(
            f"seconds of shape {seconds_PL.shape}; expected finite numbers >= 0, pairs of degrees by layers"
        )
    return seconds_PL


def nested_pairs(max_degree: int) -> Ints:
    """Forward and backward degrees up to a limit of which one divides the other, `[P, 2]`.

    Fewest pieces first, then fewest chunks, then fewest forward.
    """
    divided = [(fewer, more) for fewer in range(1, max_degree + 1) for more in range(fewer, max_degree + 1, fewer)]
    pairs = {*divided, *(pair[::-1] for pair in divided)}
    return np.array(sorted(pairs, key=lambda pair: (max(pair), sum(pair), pair)))
