"""The ExFlow strategy: transitions in, placement and proven bound out.

Legend: L MoE layers; E experts a layer; D devices, S slots of each; N nodes.

On one node the objective is `hops_kept`, the share of transitions that stay on their device (max); on several
`hop_cost`, the mean cost of a transition in hops inside a node (min). With replicas both are expectations
(`cost.hops_kept`), not what a replay counts, and are named so: `expected_hops_kept`, `expected_hop_cost`.

Let KN and KD be the shares kept on nodes and devices, rho the cost of a hop between nodes. Then

    hop_cost = rho - (rho - 1) KN - KD,                                        (1)

so that bounds on KN and KD, each from `bounds.kept_bound`, bound the cost from below. They may take a quarter of the
time limit; layer pairs that they do not reach get a weaker one, and the kind of the bound says so ("row").
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..bounds import KeptBound
from ..checked_counts import checked_counts
from ..cost import hops_kept
from ..outcome import ROUNDING, Outcome, Status
from ..placement import Placement, slots_for
from ..result import PlacementResult
from .budget import Budget
from .chain import chain
from .goal import Goal
from .hierarchy import staged
from .ilp import Backend, solve_ilp
from .programme import Programme
from .replicas import with_replicas
from .search import Incumbent, search
from .sweeps import polish

__all__ = ["solve"]

WORK = 1.5e8  # cells of assignment matrices: 3 s for 24 layers x 32 experts
ILP_START_WORK = 1e7  # before the integer programme
BOUND_SHARE = 0.25  # of the time, at most
STAGED_SHARE = 0.5  # of the work, where there are several nodes
MAX_CELLS = 2**24
BACKENDS = {"ortools": "ortools cp-sat", "pulp": "pulp cbc"}
Method = Literal["sweeps", "ilp"]


def solve(
    transitions: ArrayLike,
    cluster: Cluster,
    *,
    loads: ArrayLike | None = None,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    method: Method = "sweeps",
    backend: Backend = "ortools",
    time_limit_s: float = 30.0,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
) -> PlacementResult:
    """The placement that keeps most top-1 transitions near, found by sweeps or by the integer programme.

    Parameters
    ----------
    transitions
        W `[L-1, E, E]`: tokens going from expert a of layer l to expert b of layer l+1 (weighted if you like).
    loads
        Load of every expert `[L, E]`, for replicas only; by default what the transitions say.
    slots
        S, one number for all devices or one a device; by default ceil(E / D). Slots beyond E hold replicas.
    method, backend
        "sweeps" (any size), or "ilp" (small sizes, proven) by "ortools" (CP-SAT) or "pulp" (CBC).
    time_limit_s
        A cap on seconds, bounds included; where it does not bite, the result depends on inputs and seed alone.
    on_progress
        Called with the objective of each better layout (before replicas).

    Returns
    -------
    PlacementResult
        The best found, also after a KeyboardInterrupt; the module says what its objective is.

    Raises
    ------
    ValueError
        Transitions or loads of wrong shape, negative or not finite; an unknown method; no time.
    UsageError
        Slots that cannot hold the experts; a problem too large.
    """
    started = time.perf_counter()
    _check_options(method, backend, time_limit_s)
    budget = Budget(WORK if method == "sweeps" else ILP_START_WORK, time_limit_s)
    num_cuts, num_experts = (*np.shape(transitions), 0, 0)[:2]
    weights_LEE = checked_counts(transitions, "transitions", (num_cuts, num_experts, num_experts))
    loads_LE = _loads(weights_LEE, loads)
    slots_D = slots_for(num_experts, cluster.num_devices, slots)
    goal = Goal(cluster, float(weights_LEE.sum()), expected=bool(slots_D.sum() > num_experts))
    programme = _programme(weights_LEE, goal, slots_D)
    bound = _bound(goal, weights_LEE, slots_D, budget)
    report = None if on_progress is None else lambda value: on_progress(goal.objective(value).value)
    incumbent = Incumbent(programme, bound.value, report)
    bound, status = _search(programme, incumbent, bound, backend if method == "ilp" else None, budget, seed)
    worth = partial(_value, goal, weights_LEE)
    placement = with_replicas(programme, incumbent.layout, loads_LE, worth, budget)
    solver = BACKENDS[backend] if method == "ilp" else "moeplan"
    return PlacementResult(placement, _outcome(goal, worth(placement), bound, status, solver, started))


def _value(goal: Goal, weights_LEE: NDArray[np.float64], placement: Placement) -> float:
    return goal.value(hops_kept(weights_LEE, placement, goal.cluster.devices_per_node))


def _outcome(goal: Goal, value: float, bound: KeptBound, status: Status, solver: str, started: float) -> Outcome:
    return Outcome.of(
        status=status,
        objective=goal.objective(value),
        bound=goal.objective(bound.value).value,
        bound_kind=bound.kind,
        proven=value >= bound.value * (1 - ROUNDING),
        started=started,
        backend=solver,
    )


def _check_options(method: str, backend: str, time_limit_s: float) -> None:
    if method not in ("sweeps", "ilp") or backend not in BACKENDS or not time_limit_s > 0:
        raise ValueError(
            f"method {method!r}, backend {backend!r}, time limit {time_limit_s} s;"
            " expected sweeps or ilp, ortools or pulp, more than 0 s"
        )


def _bound(goal: Goal, weights_LEE: NDArray[np.float64], slots_D: NDArray[np.int64], budget: Budget) -> KeptBound:
    """The bound on the goal, for a share of the time."""
    part = budget.part(BOUND_SHARE)
    bound = goal.bound(weights_LEE, slots_D, time_limit_s=part.remaining_s)
    budget.settle(part)
    return bound


def _search(
    programme: Programme, incumbent: Incumbent, bound: KeptBound, backend: Backend | None, budget: Budget, seed: int
) -> tuple[KeptBound, Status]:
    """Improve `incumbent`, by the integer programme too where there is a backend; the bound then, and how it ended."""
    try:
        _improve(programme, incumbent, budget, np.random.default_rng(seed))
        if backend is not None and not incumbent.optimal:
            bound = _improve_by_ilp(programme, incumbent, bound, backend, budget, seed)
    except KeyboardInterrupt:
        return bound, Status.INTERRUPTED
    return bound, Status.TIME_LIMIT if budget.capped else Status.FEASIBLE


def _loads(weights_LEE: NDArray[np.float64], loads: ArrayLike | None) -> NDArray[np.float64]:
    """The loads given; else the transitions that leave each expert, in the last layer those that enter it, `[L, E]`."""
    if loads is not None:
        return checked_counts(loads, "loads", (len(weights_LEE) + 1, weights_LEE.shape[1]))
    if not len(weights_LEE):
        return np.ones((1, weights_LEE.shape[1]))
    return np.concatenate([weights_LEE.sum(axis=2), weights_LEE[-1:].sum(axis=1)])


def _programme(weights_LEE: NDArray[np.float64], goal: Goal, slots_D: NDArray[np.int64]) -> Programme:
    """One home for every expert."""
    num_experts, num_devices = weights_LEE.shape[1], len(slots_D)
    if max(num_devices**2, num_experts * int(slots_D.sum())) > MAX_CELLS:
        raise UsageError(
            f"{num_experts} experts in {slots_D.sum():,} slots on {num_devices:,} devices; exflow takes at most"
            f" {int(MAX_CELLS**0.5):,} devices, and experts x slots up to {MAX_CELLS:,}"
        )
    sizes = (num_experts,) * (len(weights_LEE) + 1)
    return Programme(list(weights_LEE), sizes, slots_D, goal.near, goal.cluster.devices_per_node)


def _improve(programme: Programme, incumbent: Incumbent, budget: Budget, rng: np.random.Generator) -> None:
    """Search at one level of links; where there are two, from the staged solution too."""
    if 1 < programme.devices_per_node < len(programme.slots) and not incumbent.optimal:
        layout = chain(programme, 0, budget, rng)
        incumbent.offer(layout, programme.value(layout))
        part = budget.part(STAGED_SHARE)
        layout = staged(programme, part, rng)
        budget.settle(part)
        polish(programme, layout, budget)
        incumbent.offer(layout, programme.value(layout))
    search(programme, budget, rng, incumbent)


def _improve_by_ilp(
    programme: Programme, incumbent: Incumbent, bound: KeptBound, backend: Backend, budget: Budget, seed: int
) -> KeptBound:
    """Offer the integer programme's layout; the better of its bound and `bound`."""
    found = solve_ilp(programme, incumbent.layout, backend, time_limit_s=budget.remaining_s, seed=seed)
    if found.layout is not None:
        incumbent.offer(found.layout, programme.value(found.layout))
    if not found.proven:
        budget.cap()
    has_replicas = len(programme.places) > programme.sizes[0]  # which the integer programme knows nothing of
    return bound if has_replicas or found.bound >= bound.value else KeptBound(found.bound, frozenset({"ilp"}))
