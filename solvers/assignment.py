"""Assignment of items to sinks of limited capacity at the least cost (NetMoE's Eq. 6; ExFlow's one-layer problem).

Legend: I items; N sinks; P places (sink n has `capacity[n]` of them).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from .cbc import cbc
from .cycles import cancel_cycles
from .integers import flow_units
from .two_sinks import two_sinks

__all__ = ["Method", "assign_places", "backend_of", "balanced_assignment"]

Method = Literal["transport", "flow", "km", "pulp"]
HUGE_COST = 2.0**500  # beyond, sums could overflow
WHOLE = 2.0**53  # integers that floats hold exactly
ROOM = 2.0**62  # for sums of integers
TINY = 2.0**-900  # smaller costs are all alike
ROUNDING = 8 * np.finfo(np.float64).eps


def balanced_assignment(
    cost: ArrayLike, capacity: int | Sequence[int] | NDArray[Any], method: Method = "transport"
) -> NDArray[np.int64]:
    """The sink of every item, int64 `[I]`, such that the sum of `cost[i, sink[i]]` is least.

    Parameters
    ----------
    cost
        Integers or floats `[I, N]`, finite.
    capacity
        The most items a sink takes, one number for all or one a sink.
    method
        "transport" (compiled shortest paths, "flow" where numba is missing; for two sinks a partial sort), "flow"
        (min-cost flow), "km" (Kuhn-Munkres on duplicated columns) or "pulp" (CBC). All are exact: integers below 2**53,
        floats up to their rounding. Among optima of integer cost all choose the first in lexicographic order; of float
        costs each method chooses alike on every run.

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
    if method == "transport" and len(capacity_N) == 2:
        return two_sinks(cost_IN, capacity_N)
    sink_I = solve(cost_IN, capacity_N)
    if cost_IN.dtype.kind == "f":
        return sink_I
    from .ties import first_of_ties

    return first_of_ties(cost_IN, capacity_N, sink_I)


def backend_of(method: Method) -> str:
    """What solves by a method here, in words."""
    if method == "transport":
        from .transport import COMPILED

        return "moeplan transport" if COMPILED else _BACKENDS["flow"]
    return _BACKENDS[method]


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


def _checked_cost(cost: ArrayLike) -> NDArray[Any]:
    """The costs, int64 where they are integers whose sums are exact, else float64."""
    found = np.asarray(cost)
    if found.ndim != 2 or found.shape[1] < 1 or found.dtype.kind not in "biuf":
        raise ValueError(f"cost of shape {list(found.shape)} and type {found.dtype}; expected numbers [items, sinks]")
    least, most = (float(found.min()), float(found.max())) if len(found) else (0.0, 0.0)
    if not (math.isfinite(least) and math.isfinite(most)):
        item, sink = np.argwhere(~np.isfinite(found))[0]
        raise ValueError(f"cost[{item}, {sink}] is {found[item, sink]}; expected finite numbers")
    largest = max(most, -least)
    if largest <= min(WHOLE, ROOM / (2 * found.shape[1] + 2)):
        whole_IN = found.astype(np.int64)
        if found.dtype.kind != "f" or (whole_IN == found).all():
            return whole_IN
    cost_IN = found.astype(np.float64)
    return cost_IN * 2.0**-500 if largest > HUGE_COST else cost_IN


def _checked_capacity(capacity: int | Sequence[int] | NDArray[Any], items: int, sinks: int) -> NDArray[np.int64]:
    if type(capacity) is int and capacity * sinks >= items:
        return np.full(sinks, min(capacity, items))
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


def _transport(cost_IN: NDArray[Any], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    from .ties import prices
    from .transport import COMPILED, transport

    if not COMPILED:
        return _flow(cost_IN, capacity_N)
    if cost_IN.dtype.kind != "f":
        return transport(cost_IN, capacity_N)
    sink_I = transport(_fixed_point(cost_IN), capacity_N)
    rounding = ROUNDING * float(np.abs(cost_IN[np.arange(len(sink_I)), sink_I]).max())
    _, settled = prices(cost_IN, capacity_N, sink_I, rounding)
    return sink_I if settled else cancel_cycles(cost_IN, capacity_N, sink_I)


def _fixed_point(cost_IN: NDArray[np.float64]) -> NDArray[np.int64]:
    """The costs as integers, as fine as their sums allow."""
    _, power = math.frexp(ROOM / (2 * cost_IN.shape[1] + 2) / max(float(np.abs(cost_IN).max()), TINY))
    return np.rint(np.ldexp(cost_IN, power - 1)).astype(np.int64)


def _km(cost_IN: NDArray[Any], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return assign_places(cost_IN, np.repeat(np.arange(len(capacity_N)), capacity_N))


def _flow(cost_IN: NDArray[Any], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
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


def _pulp(cost_IN: NDArray[Any], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
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


_METHODS: dict[str, Callable[[NDArray[Any], NDArray[np.int64]], NDArray[np.int64]]] = {
    "transport": _transport,
    "flow": _flow,
    "km": _km,
    "pulp": _pulp,
}
_BACKENDS = {"flow": "ortools min-cost flow", "km": "scipy kuhn-munkres", "pulp": "pulp cbc"}
