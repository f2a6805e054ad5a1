"""Assignment of items to sinks of limited capacity at the least cost (NetMoE's Eq. 6; ExFlow's one-layer problem).

Legend: I items; N sinks; P places (sink n has `capacity[n]` of them).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from .cbc import cbc
from .cycles import cancel_cycles
from .integers import flow_units

__all__ = ["Method", "assign_places", "balanced_assignment"]

Method = Literal["flow", "km", "pulp"]
HUGE_COST = 2.0**500  # beyond, sums could overflow


def balanced_assignment(
    cost: ArrayLike, capacity: int | Sequence[int] | NDArray[Any], method: Method = "flow"
) -> NDArray[np.int64]:
    """The sink of every item, int64 `[I]`, such that the sum of `cost[i, sink[i]]` is least.

    Parameters
    ----------
    cost
        Integers or floats `[I, N]`, finite.
    capacity
        The most items a sink takes, one number for all or one a sink.
    method
        "flow" (min-cost flow), "km" (Kuhn-Munkres on duplicated columns) or "pulp" (CBC). All are exact: integers
        below 2**53, floats up to their rounding.

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
    solve = _METHODS.get(method)
    if solve is None:
        raise ValueError(f"method {method!r}; expected one of {', '.join(_METHODS)}")
    cost_IN = _checked_cost(cost)
    capacity_N = _checked_capacity(capacity, *cost_IN.shape)
    if not len(cost_IN):
        return np.zeros(0, dtype=np.int64)
    return solve(cost_IN, capacity_N)


def assign_places(cost: NDArray[np.float64], sink_of_place: NDArray[np.int64]) -> NDArray[np.int64]:
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
    chosen_I: NDArray[np.int64] = sink_of_place[place_I]
    return chosen_I


def _checked_cost(cost: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(cost)
    if found.ndim != 2 or found.shape[1] < 1 or found.dtype.kind not in "biuf":
        raise ValueError(f"cost of shape {list(found.shape)} and type {found.dtype}; expected numbers [items, sinks]")
    cost_IN = found.astype(np.float64)
    if not np.isfinite(cost_IN).all():
        item, sink = np.argwhere(~np.isfinite(cost_IN))[0]
        raise ValueError(f"cost[{item}, {sink}] is {cost_IN[item, sink]}; expected finite numbers")
    return cost_IN * 2.0**-500 if np.abs(cost_IN).max(initial=0) > HUGE_COST else cost_IN


def _checked_capacity(capacity: int | Sequence[int] | NDArray[Any], items: int, sinks: int) -> NDArray[np.int64]:
    found = np.asarray(capacity)
    if found.dtype.kind not in "iu" or found.shape not in ((), (sinks,)) or (found < 0).any():
        raise ValueError(f"capacity {capacity!r}; expected one non-negative integer or {sinks}")
    capacity_N = np.broadcast_to(np.minimum(found, items).astype(np.int64), (sinks,))
    if capacity_N.sum() < items:
        raise UsageError(
            f"{items} items for {sinks} sinks that take {capacity_N.sum()} in all; raise the capacity to at least"
            f" {-(-items // sinks)} a sink"
        )
    return capacity_N


def _km(cost_IN: NDArray[np.float64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return assign_places(cost_IN, np.repeat(np.arange(len(capacity_N)), capacity_N))


def _flow(cost_IN: NDArray[np.float64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    num_items, num_sinks = cost_IN.shape
    above_IN = cost_IN - cost_IN.min(axis=1, keepdims=True)
    units_IN, _ = flow_units(above_IN)
    items, sinks, drain = np.arange(num_items), num_items + np.arange(num_sinks), num_items + num_sinks
    graph = SimpleMinCostFlow()
    arcs = graph.add_arcs_with_capacity_and_unit_cost(
        np.repeat(items, num_sinks), np.tile(sinks, num_items), np.ones(units_IN.size, np.int64), units_IN.ravel()
    )  # (1)
    graph.add_arcs_with_capacity_and_unit_cost(
        sinks, np.full(num_sinks, drain), capacity_N, np.zeros(num_sinks, np.int64)
    )  # (2)
    supply = np.concatenate([np.ones(num_items, np.int64), np.zeros(num_sinks, np.int64), [-num_items]])
    graph.set_nodes_supplies(np.arange(drain + 1), supply)
    status = graph.solve()
    assert status == graph.OPTIMAL, status
    sink_I = graph.flows(arcs).reshape(cost_IN.shape).argmax(axis=1)
    return sink_I if (units_IN == above_IN).all() else cancel_cycles(cost_IN, capacity_N, sink_I)


def _pulp(cost_IN: NDArray[np.float64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    import pulp

    units_IN, _ = flow_units(cost_IN - cost_IN.min(axis=1, keepdims=True))
    scaled = (units_IN / max(1, units_IN.max())).tolist()
    items, sinks = range(cost_IN.shape[0]), range(cost_IN.shape[1])
    model = pulp.LpProblem("assignment", pulp.LpMinimize)
    x = [[model.add_variable(f"x_{i}_{n}", cat="Binary") for n in sinks] for i in items]
    model += pulp.lpSum(scaled[i][n] * x[i][n] for i in items for n in sinks)
    for i in items:
        model += pulp.lpSum(x[i]) == 1  # (1)
    for n in sinks:
        model += pulp.lpSum(x[i][n] for i in items) <= int(capacity_N[n])  # (2)
    model.solve(cbc())
    sink_I = np.array([[x[i][n].value() for n in sinks] for i in items]).argmax(axis=1)
    return cancel_cycles(cost_IN, capacity_N, sink_I)  # CBC reads 12 digits and stops at a tolerance


_METHODS: dict[str, Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.int64]]] = {
    "flow": _flow,
    "km": _km,
    "pulp": _pulp,
}
