"""The ExFlow strategy: transitions in, placement and proven bound out.

Legend: L MoE layers; E experts per layer; D devices, S slots of each; N nodes.

On one node the objective is `hops_kept`, the share of transitions that stay on their device (max); on several
`hop_cost`, the mean cost of a transition in hops inside a node (min). With replicas both are expectations
(`cost.hops_kept`), not what a replay counts, and are named so: `expected_hops_kept`, `expected_hop_cost`.

Let KN and KD be the shares kept on nodes and devices, rho the cost of a hop between nodes. Then

    hop_cost = rho - (rho - 1) KN - KD,                                        (1)

so that bounds on KN and KD, each from `bounds.kept_bound`, bound the cost from below. They may take a quarter of the
time limit; layer pairs that they do not reach get a weaker one, and the kind of the bound says so ("row").

With co-activation, pairs of experts of one layer count as transitions do, a token's copies go down with them, and the
figure is `affinity_kept` or `affinity_cost`. A layer's pairs are bounded as if its experts were those of two layers.

The thorough bound (`bounds.thorough_bound`) is of transitions alone and takes minutes of its own, after the search.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..bounds import KeptBound
from ..outcome import ROUNDING, Outcome, PlacementResult, Status
from ..placement import Groups, Placement
from .bounded import Thorough, bound_simply, bound_thoroughly
from .budget import Budget
from .ilp import Backend
from .methods import SWEEPS_WORK, Method, Run, Stage, compile_annealing
from .problem import Goal, Problem
from .programme import Incumbent
from .replicas import anneal_replicas, with_replicas
from .whole import checked_groups, place_whole

ANNEALING_RATE = 8e8  # work of annealing a second of the time limit, about what a core does
ILP_START_WORK = 2e8  # before the integer programme
SEARCH_SHARE = 0.97  # of the time limit; the rest is for what ends late
FILL_SHARE = 0.12  # of the time, to fill slots with replicas
REPLICA_SHARE = 0.18  # of the budget, to anneal them on one level of links
BACKENDS = {"ortools": "ortools cp-sat", "pulp": "pulp cbc"}
BoundKind = Literal["simple", "thorough"]


@dataclass(frozen=True, slots=True)
class ExflowResult(PlacementResult):
    """A placement and how it came about."""

    #: What it cost after each stage (before replicas); none on one level of links, under a cap, or of whole groups
    stages: tuple[Stage, ...] = ()
    #: Seconds of compilation, or of loading what was compiled, before `outcome.wall_s` and outside the time limit
    compiled_s: float = 0.0
    #: The bound: what proves it where a thorough one was asked for, or why it is a simple one
    thorough: Thorough = field(kw_only=True)


def solve(
    transitions: ArrayLike,
    cluster: Cluster,
    *,
    coactivation: ArrayLike | None = None,
    loads: ArrayLike | None = None,
    max_load: float | None = None,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    num_groups: int | None = None,
    groups: Groups = "split",
    method: Method = "annealing",
    backend: Backend = "ortools",
    time_limit_s: float = 30.0,
    work: float | None = None,
    bound: BoundKind = "simple",
    bound_time_limit_s: float = 600.0,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
    on_bound: Callable[[float], None] | None = None,
) -> ExflowResult:
    """The placement that keeps most affinity near, found by annealing, by sweeps or by the integer programme.

    Parameters
    ----------
    transitions
        W `[L-1, E, E]`: tokens going from expert a of layer l to expert b of layer l+1 (weighted if you like).
    coactivation
        Tokens that choose experts a and b of a layer together `[L, E, E]`, for the fewest distinct devices and nodes a
        token; alone (transitions of zeros) it is the objective of standard dispatch.
    loads
        Load of every expert `[L, E]`, for replicas and caps; by default what the transitions say.
    max_load
        The most load a device may hold in a layer, over the mean.
    slots
        S, one number for all devices or one a device; by default ceil(E / D). Slots beyond E hold replicas.
    num_groups, groups
        "whole": each of so many groups of consecutive experts in a contiguous block of slots (`keeps_groups_whole`).
    method, backend
        "annealing" or "sweeps" (any size); or by "ortools" (CP-SAT) or "pulp" (CBC) "ilp" (small sizes, proven) and
        "paper", the integer programme in the paper's two stages with nothing before or after it.
    time_limit_s
        A cap on seconds, simple bounds included.
    work
        A cap on work: of annealing, by default about what a core does within the time limit; of the others, a
        fixed one. Where work ends a search, it gives the same again from the same inputs, work and seed, on one kind of
        machine with the same libraries (sums round differently on others); not where time does (`Status.TIME_LIMIT`).
    bound, bound_time_limit_s
        "simple", or then "thorough" too, for so many seconds on top.
    on_progress
        Called with the objective of each better layout (before replicas); never for whole groups.
    on_bound
        Called with the share of transitions that each better thorough bound lets stay, on devices and then on nodes.

    Returns
    -------
    ExflowResult
        The best found, also after a KeyboardInterrupt; the module says what its objective is.

    Raises
    ------
    ValueError
        Transitions or loads of wrong shape, negative or not finite; an unknown method; no time.
    UsageError
        Slots that cannot hold the experts; a problem too large; a cap that no placement keeps.
    """
    _check_options(method, backend, groups, time_limit_s, work, coactivation is not None or max_load is not None)
    _check_bound(bound, bound_time_limit_s, coactivation is not None)
    compiling_s, started = compile_annealing() if method == "annealing" else 0.0, time.perf_counter()
    budget = Budget(_work(method, time_limit_s, work), time_limit_s * SEARCH_SHARE)
    whole = groups == "whole"
    cap = None if whole else max_load
    problem = Problem.of(transitions, cluster, coactivation, loads, cap, slots, time_limit_s)
    blocks = checked_groups(problem, num_groups, max_load) if whole else None
    if problem.hurried:
        budget.cap()
    report = None if on_progress is None else lambda value: on_progress(problem.goal.objective(value).value)
    simple, interrupted = bound_simply(problem, budget)
    incumbent = Incumbent(problem.programme, simple.value, report, start=problem.start, terms=problem.terms)
    run = Run(problem.programme, problem.terms, incumbent, simple, budget, seed)
    if blocks is not None and not interrupted:
        again = partial(solve, method=method, backend=backend, seed=seed)
        placement, status = place_whole(problem, *blocks, max_load, budget, again)
        value = problem.value(placement)
    else:
        placement, value, status = _placed(problem, run, None if interrupted else method, backend)
    found = Thorough(run.bound)
    if bound == "thorough" and status is not Status.INTERRUPTED and not _proven(value, run.bound):
        found = bound_thoroughly(problem, placement, run.bound, bound_time_limit_s, on_bound)
        status = Status.INTERRUPTED if found.interrupted else status
    outcome = _outcome(problem.goal, value, found.bound, status, method, backend, started)
    return ExflowResult(placement, outcome, stages=run.stages, compiled_s=compiling_s, thorough=found)


def _placed(problem: Problem, run: Run, method: Method | None, backend: Backend) -> tuple[Placement, float, Status]:
    """The homes that a run finds, with replicas, what they are worth and how that ended; no search without a method."""
    budget, expected = run.budget, problem.goal.expected
    anneals = expected and method == "annealing" and not problem.programme.node_worth
    if expected:
        run.budget = budget.part(1 - FILL_SHARE - anneals * REPLICA_SHARE)
    status = Status.INTERRUPTED if method is None else run.solve(method, backend)
    if not expected:
        return *_replicated(problem, run, budget, anneals=False), status
    budget.settle(run.budget)
    try:
        placement, value = _replicated(problem, run, budget, anneals=anneals and status is not Status.INTERRUPTED)
    except KeyboardInterrupt:
        return *_replicated(problem, run, Budget(0, 0), anneals=False), Status.INTERRUPTED
    return placement, value, Status.TIME_LIMIT if budget.capped and status is Status.FEASIBLE else status


def _replicated(problem: Problem, run: Run, budget: Budget, *, anneals: bool) -> tuple[Placement, float]:
    """The placement of a run's homes, its replicas annealed or not, and what it is worth."""
    filling = budget.part(FILL_SHARE / (FILL_SHARE + REPLICA_SHARE) if anneals else 1)
    value, placement = with_replicas(problem.programme, run.incumbent.layout, problem.loads, problem.value, filling)
    budget.settle(filling)
    if anneals and not budget.late:
        started, value = time.perf_counter(), problem.value(placement)  # as long as the annealed one's will take
        annealing = Budget(budget.left, budget.remaining_s - 2 * (time.perf_counter() - started))
        annealed = anneal_replicas(problem.programme, placement, annealing, np.random.default_rng(run.seed))
        budget.settle(annealing)
        if annealed is not placement and (better := problem.value(annealed)) > value:
            return annealed, better
    return placement, value


def _work(method: str, time_limit_s: float, work: float | None) -> float:
    if work is not None:
        return work
    return {"annealing": ANNEALING_RATE * time_limit_s, "sweeps": SWEEPS_WORK}.get(method, ILP_START_WORK)


def _outcome(
    goal: Goal, value: float, bound: KeptBound, status: Status, method: str, backend: str, started: float
) -> Outcome:
    return Outcome.of(
        status=status,
        objective=goal.objective(value),
        bound=goal.objective(bound.value).value,
        bound_kind=bound.kind,
        proven=_proven(value, bound),
        started=started,
        backend=BACKENDS[backend] if method in ("ilp", "paper") else "moeplan",
    )


def _check_options(
    method: str, backend: str, groups: str, time_limit_s: float, work: float | None, besides: bool
) -> None:
    enough = time_limit_s > 0 and (work is None or work > 0)
    if method not in get_args(Method) or backend not in BACKENDS or groups not in get_args(Groups) or not enough:
        raise ValueError(
            f"method {method!r}, backend {backend!r}, groups {groups!r}, time limit {time_limit_s} s, work {work};"
            " expected annealing, sweeps, ilp or paper, ortools or pulp, split or whole, more than 0 s, and of work"
        )
    if besides and method != "annealing":
        raise UsageError(
            f"co-activation or a cap on loads (--max-load) with method {method}; expected annealing: no other method"
            " knows of them"
        )


def _check_bound(bound: str, time_limit_s: float, paired: bool) -> None:
    if bound not in get_args(BoundKind) or not time_limit_s > 0:
        raise ValueError(f"bound {bound!r} within {time_limit_s} s; expected simple or thorough, more than 0 s")
    if bound == "thorough" and paired:
        raise UsageError("a thorough bound with co-activation; it is of transitions alone: take --bound simple")


def _proven(value: float, bound: KeptBound) -> bool:
    return value >= bound.value * (1 - ROUNDING)
