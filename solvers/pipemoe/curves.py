"""The pipeline degree under measured curves: exact search over every degree that is allowed.

Legend: R degrees, 1 to the largest allowed.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..outcome import Objective, Outcome, Status
from .result import Degrees
from .seconds import layer_seconds

__all__ = ["Curve", "measured_degree", "tabulated_degree"]

Curve = Callable[[NDArray[np.float64]], ArrayLike]  # work of each call -> its seconds


def measured_degree(
    dispatch: Curve,
    experts: Curve,
    *,
    n_d: float,
    n_e: float,
    combine: Curve | None = None,
    backward: float = 2.0,
    max_degree: int = 64,
    capacity: int | None = None,
    full_duplex: bool = False,
) -> Degrees:
    """The best pipeline degrees of a layer whose stages take what `dispatch` and `experts` say, lines or not.

    Parameters
    ----------
    dispatch, experts
        Seconds of an all-to-all by its bytes, and of the experts by their multiply-adds.
    n_d, n_e
        Bytes that a rank dispatches, and multiply-adds of its experts.
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
        As `tabulated_degree`; a limit or a capacity below 1.
    """
    if max_degree < 1 or (capacity is not None and capacity < 1):
        raise ValueError(f"limit {max_degree}, capacity {capacity}; expected at least 1")
    degrees_R = np.arange(1, min(max_degree, capacity or max_degree) + 1)
    share_R = -(-capacity // degrees_R) / capacity if capacity else 1 / degrees_R
    return tabulated_degree(
        dispatch(share_R * n_d),
        experts(share_R * n_e),
        combine_s=None if combine is None else combine(share_R * n_d),
        backward=backward,
        full_duplex=full_duplex,
    )


def tabulated_degree(
    dispatch_s: ArrayLike,
    experts_s: ArrayLike,
    *,
    combine_s: ArrayLike | None = None,
    backward: float = 2.0,
    full_duplex: bool = False,
) -> Degrees:
    """The best pipeline degrees of a layer, given the seconds of one chunk at every degree.

    Parameters
    ----------
    dispatch_s, experts_s, combine_s
        Of one of r chunks, r = 1 .. R, `[R]`; `combine_s` None: as `dispatch_s`.
    backward, full_duplex
        As for `measured_degree`.

    Raises
    ------
    ValueError
        Seconds or a factor that are negative or not finite; tables of different lengths or none.
    """
    started = time.perf_counter()
    tables = [dispatch_s, experts_s, dispatch_s if combine_s is None else combine_s]
    dispatch_R, experts_R, combine_R = (np.asarray(table, dtype=np.float64) for table in tables)
    _check(np.array([backward]), dispatch_R, experts_R, combine_R)
    degrees_R = np.arange(1, len(dispatch_R) + 1)
    forward_R = layer_seconds(degrees_R, dispatch_R, experts_R, combine_R, full_duplex=full_duplex)
    back_R = layer_seconds(degrees_R, combine_R, backward * experts_R, dispatch_R, full_duplex=full_duplex)
    backward_R = back_R if backward else np.zeros(len(back_R))
    forward, backward_r, joint = (int(table.argmin()) for table in (forward_R, backward_R, forward_R + backward_R))
    outcome = Outcome.of(
        status=Status.OPTIMAL,
        objective=Objective("layer_s", float(forward_R[forward] + backward_R[backward_r]), "min"),
        bound_kind="exact",
        proven=True,
        started=started,
        backend="moeplan",
    )
    seconds = float(forward_R[forward]), float(backward_R[backward_r]), float(forward_R[joint] + backward_R[joint])
    return Degrees(forward + 1, backward_r + 1, joint + 1, *seconds, outcome)


def _check(backward: NDArray[np.float64], *tables: NDArray[np.float64]) -> None:
    shapes = {table.shape for table in tables}
    if len(shapes) > 1 or tables[0].ndim != 1 or not tables[0].size:
        raise ValueError(f"seconds of shapes {sorted(shapes)}; expected one a degree from 1 on, for each stage")
    if not all(np.isfinite(column).all() and (column >= 0).all() for column in (backward, *tables)):
        raise ValueError(f"negative or infinite seconds, or a factor {backward[0]}; expected finite numbers >= 0")
