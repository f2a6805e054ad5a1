"""The pipeline degrees under measured curves: a search of every degree that is allowed.

A stage whose seconds are lines needs none (`degree.py`, `layers.py`); the planner's are whatever was measured.

Legend: R degrees, 1 to the largest allowed; L MoE layers.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..outcome import Objective, Outcome, Status
from .result import LayerDegrees
from .seconds import layer_seconds

__all__ = ["Curve", "measured_degrees", "tabulated_degrees"]

Curve = Callable[[NDArray[np.float64]], ArrayLike]  # work of each call -> its seconds


def tabulated_degrees(there: ArrayLike, back: ArrayLike) -> LayerDegrees:
    """The best pipeline degrees of L layers, given what they take at every degree; the smallest among equals.

    Parameters
    ----------
    there, back
        Seconds of the passes in r = 1 .. R chunks, `[R, L]`; zeros where there is no backward pass.

    Raises
    ------
    ValueError
        Seconds that are negative or not finite; tables of different shapes or none.
    """
    started = time.perf_counter()
    forward_RL, backward_RL = _checked(there), _checked(back)
    if forward_RL.shape != backward_RL.shape:
        raise ValueError(f"passes of shapes {forward_RL.shape} and {backward_RL.shape}; expected both the same")
    tables = forward_RL, backward_RL, forward_RL + backward_RL
    forward_s, backward_s, joint_s = (table.min(axis=0) for table in tables)
    forward, backward, joint = (table.argmin(axis=0) + 1 for table in tables)
    outcome = Outcome.of(
        status=Status.OPTIMAL,
        objective=Objective("layers_s", float((forward_s + backward_s).sum()), "min"),
        bound_kind="full search",
        proven=True,
        started=started,
        backend="moeplan",
    )
    return LayerDegrees(forward, backward, joint, forward_s, backward_s, joint_s, outcome)


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
    """`tabulated_degrees` of layers whose stages take what `dispatch` and `experts` say, lines or not.

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
        Tokens of an expert. Tutel pads them to a multiple of the degree, so that a chunk has ceil(capacity / r) of them
        and r <= capacity; None: chunks of exactly 1 / r.

    Raises
    ------
    ValueError
        As `tabulated_degrees`; a limit or a capacity below 1.
    """
    if max_degree < 1 or (capacity is not None and capacity < 1):
        raise ValueError(f"limit {max_degree}, capacity {capacity}; expected at least 1")
    degree_R1 = np.arange(1, min(max_degree, capacity or max_degree) + 1)[:, None]
    share_R1 = -(-capacity // degree_R1) / capacity if capacity else 1 / degree_R1
    sent_RL, computed_RL = share_R1 * np.asarray(n_d), share_R1 * np.asarray(n_e)
    there, work = np.asarray(dispatch(sent_RL)), np.asarray(experts(computed_RL))
    back = there if combine is None else np.asarray(combine(sent_RL))
    forward_RL = layer_seconds(degree_R1, there, work, back, full_duplex=full_duplex)
    backward_RL = layer_seconds(degree_R1, back, backward * work, there, full_duplex=full_duplex)
    return tabulated_degrees(forward_RL, backward_RL if backward else np.zeros_like(backward_RL))


def _checked(seconds: ArrayLike) -> NDArray[np.float64]:
    seconds_RL = np.asarray(seconds, dtype=np.float64)
    if seconds_RL.ndim != 2 or not seconds_RL.size or not (np.isfinite(seconds_RL) & (seconds_RL >= 0)).all():
        raise ValueError(f"seconds of shape {seconds_RL.shape}; expected finite numbers >= 0, degrees by layers")
    return seconds_RL
