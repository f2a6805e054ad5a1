"""The pipeline degrees under measured curves: a search of all that are allowed.

A stage whose seconds are lines needs none, nor does a pass alone (`degree.py`, `layers.py`); the planner's curves are
whatever was measured, and passes are not alone: a layer is computed in the pieces that both cut, each a call of the
experts (`pairs.py`). With p = max(f, b) pieces, a chunk of a pass of degree r has

    t_experts = p / r  t_e(1 / p)                                                                                    (1)

Legend: R degrees, 1 to the largest allowed; P pairs of degrees; L MoE layers.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..outcome import Objective, Outcome, Status
from .pairs import nested_pairs
from .result import LayerDegrees
from .seconds import layer_seconds

__all__ = ["Curve", "measured_degrees"]

Seconds = NDArray[np.float64]
Curve = Callable[[NDArray[np.float64]], ArrayLike]  # work of each call -> its seconds


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
        Seconds of an all-to-all by its bytes, and of the experts by their multiply-adds.
    n_d, n_e
        Bytes that a rank dispatches, and multiply-adds of its experts, numbers or `[L]`.
    combine
        Seconds of the way back by the bytes dispatched; None: as `dispatch`.
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

    def taken(degree_P1: NDArray[np.int64], first: Curve, factor: float, last: Curve) -> Seconds:
        calls_P1 = pieces_P1 / degree_P1
        sent_PL, called_PL = calls_P1 * share_P1 * np.asarray(n_d), share_P1 * np.asarray(n_e)
        first_PL, call_PL, last_PL = _checked(first(sent_PL)), _checked(experts(called_PL)), _checked(last(sent_PL))
        return layer_seconds(degree_P1, first_PL, factor * calls_P1 * call_PL, last_PL, full_duplex=full_duplex)  # (1)

    back = dispatch if combine is None else combine
    forward_PL = taken(pairs[:, :1], dispatch, 1.0, back)
    backward_PL = taken(pairs[:, 1:], back, backward, dispatch) if backward else np.zeros_like(forward_PL)
    return _best(pairs, forward_PL, backward_PL, started)


def _best(pairs: NDArray[np.int64], forward_PL: Seconds, backward_PL: Seconds, started: float) -> LayerDegrees:
    """The first of the fastest pairs of every layer, and the best that are one degree for both passes."""
    both_PL = forward_PL + backward_PL
    best_L, layers = both_PL.argmin(axis=0), np.arange(both_PL.shape[1])
    alike_RL = both_PL[pairs[:, 0] == pairs[:, 1]]
    forward_L, backward_L = pairs[best_L].T
    outcome = Outcome.of(
        status=Status.OPTIMAL,
        objective=Objective("layers_s", float(both_PL[best_L, layers].sum()), "min"),
        bound_kind="full search",
        proven=True,
        started=started,
        backend="moeplan",
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


def _checked(seconds: ArrayLike) -> Seconds:
    seconds_PL = np.asarray(seconds, dtype=np.float64)
    if seconds_PL.ndim != 2 or not seconds_PL.size or not (np.isfinite(seconds_PL) & (seconds_PL >= 0)).all():
        raise ValueError(
            f"seconds of shape {seconds_PL.shape}; expected finite numbers >= 0, pairs of degrees by layers"
        )
    return seconds_PL
