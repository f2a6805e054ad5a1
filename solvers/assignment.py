"""Assignment of items to sinks of limited capacity at the least cost (NetMoE's Eq. 6; ExFlow's one-layer problem).

Legend: I items; N sinks; P places (sink n has `capacity[n]` of them).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from .cbc import cbc
from .cycles import cancel_cycles
from .integers import flow_units

__all__ = ["Method", "assign_places", "backend_of", "balanced_assignment"]

Method = Literal["transport", "flow", "km", "pulp"]
ROOM = 2**61  # for sums of differences
INTEGERS = "?bBhHiIlq"  # types of numpy that int64 holds
Solver = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]


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
        "transport" (for two sinks a partial sort, else compiled shortest paths, "flow" where numba is missing), "flow"
        (min-cost flow), "km" (Kuhn-Munkres on duplicated columns) or "pulp" (CBC). All are exact, integers up to
        2**61 / (N + 1) and floats up to their rounding, and all give the same assignment: among optima the first in
        lexicographic order; for floats, of the costs in fixed point (`units`).

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
    found = np.asarray(cost)
    if found.ndim != 2 or found.shape[1] < 1 or found.dtype.kind not in "biuf":
        raise ValueError(f"cost of shape {list(found.shape)} and type {found.dtype}; expected numbers [items, sinks]")
    capacity_N = _checked_capacity(capacity, *found.shape)
    if not len(found):
        return np.zeros(0, dtype=np.int64)
    limit = ROOM // (found.shape[1] + 1)
    if found.dtype.char in INTEGERS:
        units_IN = np.ascontiguousarray(found, dtype=np.int64)
        if _kernels().greatest(units_IN) <= limit:
            return solve(units_IN, capacity_N)
    return _of_floats(found, capacity_N, solve, limit.bit_length() - 1)


def backend_of(method: Method) -> str:
    """What solves by a method here, in words."""
    if method == "transport":
        return "moeplan transport" if _kernels().compiled else _BACKENDS["flow"]
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


class _Kernels(NamedTuple):
    """What is compiled where there is numba, which loads with it."""

    compiled: bool
    transport: Solver
    two_sinks: Solver
    first_of_ties: Callable[..., NDArray[np.int64]]
    prices: Callable[..., tuple[NDArray[Any], bool]]
    greatest: Callable[..., float]
    exponent: Callable[..., int]
    fixed_point: Callable[..., tuple[NDArray[np.int64], bool]]
    settled: Callable[..., bool]


@functools.cache
def _kernels() -> _Kernels:
    from .ties import first_of_ties, prices
    from .transport import COMPILED, transport
    from .two_sinks import two_sinks
    from .units import exponent, fixed_point, greatest, settled

    return _Kernels(COMPILED, transport, two_sinks, first_of_ties, prices, greatest, exponent, fixed_point, settled)


def _of_floats(found: NDArray[Any], capacity_N: NDArray[np.int64], solve: Solver, bits: int) -> NDArray[np.int64]:
    """The assignment for costs in fixed point of so many bits; mended where their range is wider."""
    cost_IN, kernels = np.ascontiguousarray(found, dtype=np.float64), _kernels()
    power = bits - kernels.exponent(cost_IN)
    if power == bits - 1025:
        item, sink = np.argwhere(~np.isfinite(cost_IN))[0]
        raise ValueError(f"cost[{item}, {sink}] is {found[item, sink]}; expected finite numbers")
    units_IN, exact = kernels.fixed_point(cost_IN, power)
    sink_I = solve(units_IN, capacity_N)
    if exact or kernels.settled(cost_IN, power, capacity_N, sink_I):
        return sink_I
    return cancel_cycles(np.ldexp(cost_IN, min(power, 0)), capacity_N, sink_I)


def _checked_capacity(capacity: int | Sequence[int] | NDArray[Any], items: int, sinks: int) -> NDArray[np.int64]:
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


def _transport(units_IN: NDArray[np.int64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    kernels = _kernels()
    if len(capacity_N) == 2:
        return kernels.two_sinks(units_IN, capacity_N)
    if not kernels.compiled:
        return _first(_flow, units_IN, capacity_N)
    return kernels.first_of_ties(units_IN, capacity_N, kernels.transport(units_IN, capacity_N))


def _first(method: Solver, units_IN: NDArray[np.int64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of the optimal assignments, from that of a method which may round or stop at a tolerance."""
    kernels = _kernels()
    above_IN = units_IN - units_IN.min(axis=1, keepdims=True)
    common = int(np.bitwise_or.reduce(above_IN, axis=None))
    above_IN >>= max(0, (common & -common).bit_length() - 1)
    sink_I = method(above_IN, capacity_N)
    if not kernels.prices(above_IN, capacity_N, sink_I, 0)[1]:
        sink_I = cancel_cycles(above_IN, capacity_N, sink_I)
    return kernels.first_of_ties(above_IN, capacity_N, sink_I)


def _km(above_IN: NDArray[np.int64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return assign_places(above_IN.astype(np.float64), np.repeat(np.arange(len(capacity_N)), capacity_N))


def _flow(above_IN: NDArray[np.int64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
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


def _pulp(above_IN: NDArray[np.int64], capacity_N: NDArray[np.int64]) -> NDArray[np.int64]:
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
    model.solve(cbc())
    return np.asarray(np.array([[x[i][n].value() for n in sinks] for i in items]).argmax(axis=1))


_METHODS: dict[str, Solver] = {
    "transport": _transport,
    "flow": functools.partial(_first, _flow),
    "km": functools.partial(_first, _km),
    "pulp": functools.partial(_first, _pulp),
}
_BACKENDS = {"flow": "ortools min-cost flow", "km": "scipy kuhn-munkres", "pulp": "pulp cbc"}
