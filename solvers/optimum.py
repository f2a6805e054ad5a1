"""The first in lexicographic order of the optimal assignments of items to sinks, by any of the methods.

Costs become whole units, which every method adds and compares without rounding.

To be imported in the call that needs it: what is compiled loads with it.

Legend: I items; N sinks. (1) and (2) are the constraints of `assignment.balanced_assignment`.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints, flow_units
from .cbc import solve_by_cbc
from .compiled import compiled
from .exchanges import cancel_cycles, first_of_ties, prices
from .transport import transport, two_sinks

__all__ = ["exponent", "fixed_point", "greatest", "optimum", "settled"]

Solver = Callable[[Ints, Ints], Ints]
ROOM = 2**61  # for sums of differences
MAX_EXPONENT = 1024  # of finite floats
MAGNITUDE, MANTISSA_BITS = 2**63 - 1, 52  # of a float's bits
ROUNDING = 8 * 2.0**-MANTISSA_BITS


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


@compiled
def greatest(cost: Ints) -> int:
    """The greatest magnitude in `[I, N]`, I and N at least 1; that of -2**63, which int64 lacks, as 2**63 - 1."""
    most = least = 0
    for value in cost.ravel():
        most, least = max(most, int(value)), min(least, int(value))
    return max(most, -max(least, -MAGNITUDE))


@compiled
def exponent(cost: Floats) -> int:
    """The least e with all of `[I, N]` below 2**e in magnitude, -1022 if it is less; 1025 where one is not finite."""
    most = 0
    for bits in cost.view(np.int64).ravel():
        most = max(most, int(bits) & MAGNITUDE)
    return (most >> MANTISSA_BITS) - 1022


@compiled
def fixed_point(cost: Floats, power: int) -> tuple[Ints, bool]:
    """The costs times 2**power, rounded to integers `[I, N]`, and whether nothing was rounded."""
    units, exact = np.empty(cost.shape, np.int64), True
    low, high = 2.0 ** (power // 2), 2.0 ** (power - power // 2)  # 2**power alone may overflow
    for i in range(cost.shape[0]):
        for n in range(cost.shape[1]):
            scaled = cost[i, n] * low * high
            rounded = np.rint(scaled)
            units[i, n] = rounded
            exact &= rounded == scaled
    return units, exact


@compiled
def settled(cost: Floats, power: int, capacity: Ints, sink: Ints) -> bool:
    """Whether the best assignment of the costs in fixed point is the best, up to the rounding of floats.

    Notes
    -----
    Rounding to units changes an item's move between sinks by at most one, an exchange between all N sinks by at most N.
    """
    low, high, most = 2.0 ** (power // 2), 2.0 ** (power - power // 2), 0.0
    for i in range(len(sink)):
        most = max(most, abs(cost[i, sink[i]] * low * high))
    rounding = ROUNDING * most
    return cost.shape[1] <= rounding or prices(cost * low * high, capacity, sink, rounding)[1]


def _transport(units_IN: Ints, capacity_N: Ints) -> Ints:
    if len(capacity_N) == 2:
        return two_sinks(units_IN, capacity_N)
    return first_of_ties(units_IN, capacity_N, transport(units_IN, capacity_N))[0]


def _first(method: Solver, units_IN: Ints, capacity_N: Ints) -> Ints:
    """The first of the optimal assignments, from that of a method; where it rounds or stops early, from our own."""
    above_IN = units_IN - units_IN.min(axis=1, keepdims=True)
    common = int(np.bitwise_or.reduce(above_IN, axis=None))
    above_IN >>= max(0, (common & -common).bit_length() - 1)
    first_I, optimal = first_of_ties(above_IN, capacity_N, method(above_IN, capacity_N))
    return first_I if optimal else _transport(above_IN, capacity_N)


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
