"""Assignment of items to sinks of limited capacity at the least cost (NetMoE's Eq. 6; ExFlow's one-layer problem).

Legend: I items; N sinks; P places (sink n has `capacity[n]` of them).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from .arrays import Floats, Ints

__all__ = ["Method", "assign_places", "backend_of", "balanced_assignment"]

Method = Literal["transport", "flow", "km", "pulp"]
_BACKENDS: dict[str, str] = {
    "transport": "moeplan transport",
    "flow": "ortools min-cost flow",
    "km": "scipy kuhn-munkres",
    "pulp": "pulp cbc",
}


def balanced_assignment(
    cost: ArrayLike, capacity: int | Sequence[int] | NDArray[Any], method: Method = "transport"
) -> Ints:
    """The sink of every item, int64 `[I]`, such that the sum of `cost[i, sink[i]]` is least.

    Parameters
    ----------
    cost
        Integers or floats `[I, N]`, finite.
    capacity
        The most items a sink takes, one number for all or one a sink.
    method
        "transport" (for two sinks a partial sort, else shortest paths), "flow" (min-cost flow), "km" (Kuhn-Munkres on
        duplicated columns) or "pulp" (CBC). All are exact, integers up to 2**61 / (N + 1) and floats up to their
        rounding, and all give the same assignment: among optima the first in lexicographic order; for floats, of the
        costs in fixed point (`units`).

    Raises
    ------
    ValueError
        NaN, infinities, wrong shapes, an unknown method.
    UsageError
        The sinks together take fewer than I items.

    Notes
    -----
    The transportation problem of Eq. 6 without its duplicated columns (NetMoE, Eq. 6-10),

        min sum_{i,n} c[i,n] x[i,n]   s.t.   (1) sum_n x[i,n] = 1    (2) sum_i x[i,n] <= capacity[n]    x in {0, 1}
    """
    if method not in _BACKENDS:
        raise ValueError(f"method {method!r}; expected one of {', '.join(_BACKENDS)}")
    found = np.asarray(cost)
    if found.ndim != 2 or found.shape[1] < 1 or found.dtype.kind not in "biuf":
        raise ValueError(f"cost of shape {list(found.shape)} and type {found.dtype}; expected numbers [items, sinks]")
    capacity_N = _checked_capacity(capacity, *found.shape)
    if not len(found):
        return np.zeros(0, dtype=np.int64)
    return _optimum()(found, capacity_N, method)


def backend_of(method: Method) -> str:
    """Name of the backend that solves by a method here."""
    return _BACKENDS[method]


def assign_places(cost: Floats, sink_of_place: Ints) -> Ints:
    """The sink of every item `[I]` at the least cost, each place taken once: Kuhn-Munkres, unchecked and fast.

    Parameters
    ----------
    cost
        `[I, N]`, finite.
    sink_of_place
        The sink each of P >= I places belongs to, `[P]`.
    """
    from scipy.optimize import linear_sum_assignment

    _, place_I = linear_sum_assignment(cost[:, sink_of_place])
    chosen_I: Ints = sink_of_place[place_I]
    return chosen_I


@functools.cache
def _optimum() -> Callable[[NDArray[Any], Ints, str], Ints]:
    from .optimum import optimum  # numba loads with it

    return optimum


def _checked_capacity(capacity: int | Sequence[int] | NDArray[Any], items: int, sinks: int) -> Ints:
    if type(capacity) is int and capacity * sinks >= items:
        capacity_N = np.empty(sinks, dtype=np.int64)
        capacity_N.fill(min(capacity, items))
        return capacity_N
    found = np.asarray(capacity)
    if found.dtype.kind not in "iu" or found.shape not in ((), (sinks,)) or (found < 0).any():
        raise ValueError(f"capacity {capacity!r}; expected one non-negative integer or {sinks}")
    capacity_N = np.full(sinks, np.minimum(found, items), dtype=np.int64)
    if capacity_N.sum() < items:
        raise UsageError(
            f"{items} items for {sinks} sinks that take {capacity_N.sum()} in all; raise the capacity to at least"
            f" {-(-items // sinks)} a sink"
        )
    return capacity_N
