"""The first in lexicographic order of the optimal assignments of items to sinks, by any of the methods.

To be imported in the call that needs it: what is compiled loads with it.

Legend: I items; N sinks. (1) and (2) are the constraints of `assignment.balanced_assignment`.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cbc import solve_by_cbc
from .cycles import cancel_cycles
from .integers import flow_units
from .ties import first_of_ties
from .transport import transport
from .two_sinks import two_sinks
from .units import exponent, fixed_point, greatest, settled

__all__ = ["optimum"]

Ints = NDArray[np.int64]
Solver = Callable[[Ints, Ints], Ints]
ROOM = 2**61  # for sums of differences
MAX_EXPONENT = 1024  # of finite floats


def optimum(cost: NDArray[Any], capacity: Ints, method: str) -> Ints:
    """The sink of every item, int64 `[I]`, as `assignment.balanced_assignment` says, whose checks are done.

    Parameters
    ----------
    cost
        Integers or floats `[I, N]`, I and N at least 1.
    capacity
        The most items a sink takes, `[N]`, enough.

    Raises
    ------
    ValueError
        NaN or infinities.
    """
    solve, limit = _METHODS[method], ROOM // (cost.shape[1] + 1)
    kind = cost.dtype.kind
    if kind in "bi" or (kind == "u" and cost.max() <= limit):
        units_IN = np.ascontiguousarray(cost, dtype=np.int64)
        if greatest(units_IN) <= limit:
            return solve(units_IN, capacity)
    return _of_floats(cost, capacity, solve, limit.bit_length() - 1)


def _of_floats(found_IN: NDArray[Any], capacity_N: Ints, solve: Solver, bits: int) -> Ints:
    """The assignment for costs in fixed point of so many bits; mended where their range is wider."""
    with np.errstate(over="ignore"):  # of wider floats
        cost_IN = np.ascontiguousarray(found_IN, dtype=np.float64)
    magnitude = exponent(cost_IN)
    if magnitude > MAX_EXPONENT:
        item, sink = np.argwhere(~np.isfinite(cost_IN))[0]
        raise ValueError(f"cost[{item}, {sink}] is {found_IN[item, sink]!s}; expected finite numbers within float64")
    power = bits - magnitude
    units_IN, exact = fixed_point(cost_IN, power)
    sink_I = solve(units_IN, capacity_N)
    if exact or settled(cost_IN, power, capacity_N, sink_I):
        return sink_I
    return cancel_cycles(np.ldexp(cost_IN, min(power, 0)), capacity_N, sink_I)


def _transport(units_IN: Ints, capacity_N: Ints) -> Ints:
    if len(capacity_N) == 2:
        return two_sinks(units_IN, capacity_N)
    return first_of_ties(units_IN, capacity_N, transport(units_IN, capacity_N))[0]


def _first(method: Solver, units_IN: Ints, capacity_N: Ints) -> Ints:
    """The first of the optimal assignments, from that of a method which may round or stop at a tolerance."""
    above_IN = units_IN - units_IN.min(axis=1, keepdims=True)
    common = int(np.bitwise_or.reduce(above_IN, axis=None))
    above_IN >>= max(0, (common & -common).bit_length() - 1)
    sink_I = method(above_IN, capacity_N)
    first_I, optimal = first_of_ties(above_IN, capacity_N, sink_I)
    if optimal:
        return first_I
    return first_of_ties(above_IN, capacity_N, cancel_cycles(above_IN, capacity_N, sink_I))[0]


def _km(above_IN: Ints, capacity_N: Ints) -> Ints:
    from scipy.optimize import linear_sum_assignment

    sink_of_place = np.repeat(np.arange(len(capacity_N)), capacity_N)
    chosen_I: Ints = sink_of_place[linear_sum_assignment(above_IN[:, sink_of_place].astype(np.float64))[1]]
    return chosen_I


def _flow(above_IN: Ints, capacity_N: Ints) -> Ints:
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    num_items, num_sinks = above_IN.shape
    units_IN, _ = flow_units(above_IN.astype(np.float64))
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
    return np.asarray(graph.flows(arcs).reshape(above_IN.shape).argmax(axis=1))


def _pulp(above_IN: Ints, capacity_N: Ints) -> Ints:
    import pulp

    scaled = (above_IN / max(1, above_IN.max())).tolist()
    items, sinks = range(above_IN.shape[0]), range(above_IN.shape[1])
    model = pulp.LpProblem("assignment", pulp.LpMinimize)
    x = [[model.add_variable(f"x_{i}_{n}", cat="Binary") for n in sinks] for i in items]
    model += pulp.lpSum(scaled[i][n] * x[i][n] for i in items for n in sinks)
    for i in items:
        model += pulp.lpSum(x[i]) == 1  # (1)
    for n in sinks:
        model += pulp.lpSum(x[i][n] for i in items) <= int(capacity_N[n])  # (2)
    solve_by_cbc(model)
    return np.asarray(np.array([[x[i][n].value() for n in sinks] for i in items]).argmax(axis=1))


_METHODS: dict[str, Solver] = {
    "transport": _transport,
    "flow": functools.partial(_first, _flow),
    "km": functools.partial(_first, _km),
    "pulp": functools.partial(_first, _pulp),
}
