"""Assignment of items to sinks of limited capacity at the least cost (NetMoE's Eq. 6; ExFlow's one-layer problem).

Legend: I items; N sinks; P places (sink n has `capacity[n]` of them).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from .arrays import Floats, Ints, flow_units
from .cbc import solve_by_cbc

Method = Literal["transport", "flow", "km", "pulp"]
Costs = NDArray[Any]  # int64 or float64, `[I, N]`
ROOM = 2**61  # for sums of differences
HUGE = 2.0**960  # floats above are scaled down, so that no sum of them overflows


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
        duplicated columns) or "pulp" (CBC). Among equal optima each has its own. "transport" is exact for integers up
        to 2**61 / (N + 1), "flow" and "km" up to 2**40. For floats they are up to the rounding of the largest, "flow"
        up to 1e-12 of it, and "pulp" always up to 1e-7.

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
    if method not in _METHODS:
        raise ValueError(f"method {method!r}; expected one of {', '.join(_METHODS)}")
    cost_IN = np.asarray(cost)
    if cost_IN.ndim != 2 or cost_IN.shape[1] < 1 or cost_IN.dtype.kind not in "biuf":
        shape = list(cost_IN.shape)
        raise ValueError(f"cost of shape {shape} and type {cost_IN.dtype}; expected numbers [items, sinks]")
    capacity_N = _checked_capacity(capacity, *cost_IN.shape)
    if not len(cost_IN):
        return np.zeros(0, dtype=np.int64)
    return _METHODS[method][1](_checked_costs(cost_IN), capacity_N)


def backend_of(method: Method) -> str:
    """Name of the backend that solves by a method here."""
    return _METHODS[method][0]


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


def _checked_costs(cost_IN: Costs) -> Costs:
    """Costs as int64 where no sum of them overflows, else as float64."""
    limit = ROOM // (cost_IN.shape[1] + 1)
    if cost_IN.dtype.kind in "biu" and -limit <= int(cost_IN.min()) and int(cost_IN.max()) <= limit:
        return np.ascontiguousarray(cost_IN, np.int64)
    with np.errstate(over="ignore"):  # of wider floats
        costs = np.ascontiguousarray(cost_IN, np.float64)
    if not np.isfinite(costs).all():
        item, sink = np.argwhere(~np.isfinite(costs))[0]
        raise ValueError(f"cost[{item}, {sink}] is {cost_IN[item, sink]!s}; expected finite numbers within float64")
    most = np.abs(costs).max()
    return costs if most < HUGE else costs / HUGE


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


def _transport(cost_IN: Costs, capacity_N: Ints) -> Ints:
    from .transport import transport, two_sinks  # numba loads with it

    return (two_sinks if len(capacity_N) == 2 else transport)(cost_IN, capacity_N)


def _km(cost_IN: Costs, capacity_N: Ints) -> Ints:
    return assign_places(_above_least(cost_IN), np.repeat(np.arange(len(capacity_N)), capacity_N))


def _flow(cost_IN: Costs, capacity_N: Ints) -> Ints:
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    num_items, num_sinks = cost_IN.shape
    units_IN, _ = flow_units(_above_least(cost_IN))
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
    return np.asarray(graph.flows(arcs).reshape(cost_IN.shape).argmax(axis=1))


def _pulp(cost_IN: Costs, capacity_N: Ints) -> Ints:
    import pulp

    above_IN = _above_least(cost_IN)
    scaled = (above_IN / (above_IN.max() or 1)).tolist()
    items, sinks = range(cost_IN.shape[0]), range(cost_IN.shape[1])
    model = pulp.LpProblem("assignment", pulp.LpMinimize)
    x = [[model.add_variable(f"x_{i}_{n}", cat="Binary") for n in sinks] for i in items]
    model += pulp.lpSum(scaled[i][n] * x[i][n] for i in items for n in sinks)
    for i in items:
        model += pulp.lpSum(x[i]) == 1  # (1)
    for n in sinks:
        model += pulp.lpSum(x[i][n] for i in items) <= int(capacity_N[n])  # (2)
    solve_by_cbc(model)
    return np.asarray(np.array([[x[i][n].value() for n in sinks] for i in items]).argmax(axis=1))


def _above_least(cost_IN: Costs) -> Floats:
    """Costs above the least of each item, which decide nothing else."""
    above_IN: Floats = (cost_IN - cost_IN.min(axis=1, keepdims=True)).astype(np.float64)
    return above_IN


_METHODS: dict[str, tuple[str, Callable[[Costs, Ints], Ints]]] = {
    "transport": ("moeplan transport", _transport),
    "flow": ("ortools min-cost flow", _flow),
    "km": ("scipy kuhn-munkres", _km),
    "pulp": ("pulp cbc", _pulp),
}
