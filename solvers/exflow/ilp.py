"""ExFlow's integer programme, aggregated over tokens: the oracle for small cases, and the paper's way in two stages.

CP-SAT leaves signals to Python: its own handler would stay away for good, so that the next Ctrl-C kills.

Legend: L MoE layers; E experts per layer; D devices, S slots of each; N nodes of G devices.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..cbc import solve_by_cbc
from .budget import Budget
from .programme import Layout, Programme

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

STOP_S = 0.1  # between two calls to stop: one before the search has begun goes unheard
Backend = Literal["ortools", "pulp"]
NODE_SHARE = 0.5  # of the time; what it leaves goes to the devices inside the nodes


@dataclass(frozen=True, slots=True)
class Solved:
    """The solver that holds the best solution (None: there is none), whether it is proven, and whether Ctrl-C came."""

    solver: "CpSolver | None"
    proven: bool
    interrupted: bool


def solved(model: "CpModel", *, time_limit_s: float, seed: int = 0) -> Solved:
    """The best solution found in so many seconds, repeatably, or until Ctrl-C."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1  # repeatable
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        search, interrupted = pool.submit(solver.solve, model), False
        try:
            wait([search])
        except KeyboardInterrupt:
            interrupted = True
        finally:
            while not search.done():
                solver.stop_search()
                wait([search], STOP_S)
    found = search.result() in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solved(solver if found else None, search.result() == cp_model.OPTIMAL, interrupted)


@dataclass(frozen=True, slots=True)
class IlpResult:
    """A layout, the start where nothing was found in time, a bound on the value (infinite: none known), if they meet.

    And whether Ctrl-C cut it short.
    """

    layout: Layout
    bound: float
    proven: bool
    interrupted: bool = False


class Pair(NamedTuple):
    """A transition from expert a of a layer to expert b of the next."""

    layer: int
    a: int
    b: int


def solve_ilp(programme: Programme, start: Layout, backend: Backend, *, time_limit_s: float, seed: int) -> IlpResult:
    """The programme solved by an integer solver that starts from a layout.

    Notes
    -----
    x[l,a,d] places expert a of layer l; R[l,a,b] says that the transition leaves its device, Q[l,a,b] its node.
    Equation 8 of the paper with tokens of equal path counted together, and with the two *different* experts of a
    transition in Eq. 11; Eq. 12 follows, as the x of an expert sum to 1. With near = q (same node) + r (same device),

        min sum W[l,a,b] (r R[l,a,b] + q Q[l,a,b])
        s.t. (1) sum_d x[l,a,d] = 1                                                          (Eq. 10)
             (2) sum_a x[l,a,d] <= S[d]                                                      (Eq. 9)
             (3) R[l,a,b] >= x[l,a,d] - x[l+1,b,d]                           for W[l,a,b] > 0, all d  (Eq. 11)
             (4) Q[l,a,b] >= sum_{d in n} x[l,a,d] - sum_{d in n} x[l+1,b,d]  for W[l,a,b] > 0, all n, if q > 0

    Its value is W.sum() max(near) minus the minimum.
    """
    return _BACKENDS[backend](programme, start, Budget(0, time_limit_s), seed)


def _pairs(programme: Programme) -> Iterator[tuple[Pair, float, list[range]]]:
    """Transitions, what each loses when it leaves a device or a node, and the runs of devices that it may leave."""
    group, num_devices = programme.devices_per_node, len(programme.slots)
    gains = {1: float(programme.near[0, 0]) - programme.node_worth}
    if programme.node_worth:
        gains[group] = programme.node_worth
    runs = {size: [range(first, first + size) for first in range(0, num_devices, size)] for size in gains}
    for cut, weight_EE in enumerate(programme.weights):
        for a, b in np.argwhere(weight_EE > 0).tolist():
            for size, gain in gains.items():
                yield Pair(cut, a, b), float(gain * weight_EE[a, b]), runs[size]


def _most(programme: Programme) -> float:
    """The value if nothing left its device."""
    return float(programme.near.max()) * sum(float(weight_EE.sum()) for weight_EE in programme.weights)


def _ortools(programme: Programme, start: Layout, budget: Budget, seed: int) -> IlpResult:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    devices = range(len(programme.slots))
    x = [[[model.new_bool_var("") for _ in devices] for _ in range(size)] for size in programme.sizes]
    for layer, device_E in zip(x, start, strict=True):
        for expert, home in zip(layer, device_E.tolist(), strict=True):
            model.add_exactly_one(expert)  # (1)
            for d in devices:
                model.add_hint(expert[d], int(d == home))
        for d in devices:
            model.add(sum(expert[d] for expert in layer) <= int(programme.slots[d]))  # (2)
    leaves, losses = [], []
    for pair, loss, runs in _pairs(programme):
        if budget.late:
            return IlpResult(start, np.inf, proven=False)
        here, there = x[pair.layer][pair.a], x[pair.layer + 1][pair.b]
        leaves.append(left := model.new_bool_var(""))
        losses.append(loss)
        for run in runs:
            model.add(left >= sum(here[d] - there[d] for d in run))  # (3), (4)
    scale = _integer_scale(losses)
    model.minimize(sum(int(loss * scale) * left for loss, left in zip(losses, leaves, strict=True)))
    found = solved(model, time_limit_s=budget.remaining_s, seed=seed)
    if found.solver is None:
        return IlpResult(start, np.inf, proven=False, interrupted=found.interrupted)
    layout, bound = _layout(x, found.solver.value), _most(programme) - found.solver.best_objective_bound / scale
    return IlpResult(layout, bound, found.proven, found.interrupted)


def _integer_scale(losses: list[float]) -> float:
    """Scale that makes the losses integers, 62 bits in total. Rounding goes down, so that a bound stays one."""
    if all(loss.is_integer() for loss in losses) and sum(losses) < 2**53:
        return 1.0
    return 2.0**60 / sum(losses)


def _pulp(programme: Programme, start: Layout, budget: Budget, seed: int) -> IlpResult:
    import pulp

    model = pulp.LpProblem("exflow", pulp.LpMinimize)
    devices = range(len(programme.slots))
    x = [
        [[model.add_variable(f"x_{layer}_{e}_{d}", cat="Binary") for d in devices] for e in range(size)]
        for layer, size in enumerate(programme.sizes)
    ]
    largest = max((float(w.max(initial=0.0)) for w in programme.weights), default=1.0) or 1.0
    objective = []
    for number, (pair, loss, runs) in enumerate(_pairs(programme)):
        if budget.late:
            return IlpResult(start, np.inf, proven=False)
        here, there = x[pair.layer][pair.a], x[pair.layer + 1][pair.b]
        left = model.add_variable(f"left_{number}", 0, 1)
        objective.append(loss / largest * left)
        for run in runs:
            model += left >= pulp.lpSum(here[d] - there[d] for d in run)  # (3), (4)
    model += pulp.lpSum(objective)
    for layer, device_E in zip(x, start, strict=True):
        for expert, home in zip(layer, device_E.tolist(), strict=True):
            model += pulp.lpSum(expert) == 1  # (1)
            for d in devices:
                expert[d].setInitialValue(int(d == home))
        for d in devices:
            model += pulp.lpSum(expert[d] for expert in layer) <= int(programme.slots[d])  # (2)
    options = [f"randomSeed {seed % 2**31}", "ratioGap 0", "allowableGap 0"]
    solve_by_cbc(model, time_limit_s=budget.remaining_s, options=options)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return IlpResult(start, np.inf, proven=False)
    layout = _layout(x, pulp.value)
    proven = model.sol_status == pulp.LpSolutionOptimal
    return IlpResult(layout, programme.value(layout) if proven else np.inf, proven)


def _layout(x: list[list[list[Any]]], value: Callable[[Any], Any]) -> Layout:
    """Device of every expert, in layers that may have none."""
    return [np.array([np.argmax([value(on) for on in expert]) for expert in layer], np.int64) for layer in x]


_BACKENDS: dict[str, Callable[[Programme, Layout, Budget, int], IlpResult]] = {"ortools": _ortools, "pulp": _pulp}


def solve_paper(programme: Programme, backend: Backend, *, time_limit_s: float, seed: int) -> IlpResult:
    """The layout of the two stages, each solved from experts in their own order.

    Notes
    -----
    Equation 8 under 9-12 with R for routes that leave a node, then, inside each node with the routes that leave it
    dropped, with R for those that leave a device. Tokens of equal path are counted together (`solve_ilp`), which
    changes no optimum. On one node, or with one device a node, there is one stage and its bound is one; the two are
    greedy, hence `proven` says that each stage is optimal, and the bound is infinite. After Ctrl-C the stages that are
    left keep experts in their own order.
    """
    deadline = time.perf_counter() + time_limit_s
    group, num_devices = programme.devices_per_node, len(programme.slots)
    if group in (1, num_devices):
        return solve_ilp(programme, programme.first_layout(), backend, time_limit_s=time_limit_s, seed=seed)
    nodes = programme.of_nodes()
    stages = [solve_ilp(nodes, nodes.first_layout(), backend, time_limit_s=time_limit_s * NODE_SHARE, seed=seed)]
    members = programme.members(stages[0].layout)
    for node, member in enumerate(members):
        inside, left_s = programme.inside(node, member), max(deadline - time.perf_counter(), 0.0)
        limit_s = 0.0 if any(stage.interrupted for stage in stages) else left_s / (len(members) - node)
        stages.append(solve_ilp(inside, inside.first_layout(), backend, time_limit_s=limit_s, seed=seed))
    layout = programme.joined(members, [stage.layout for stage in stages[1:]])
    proven, interrupted = all(stage.proven for stage in stages), any(stage.interrupted for stage in stages)
    return IlpResult(layout, np.inf, proven, interrupted)
