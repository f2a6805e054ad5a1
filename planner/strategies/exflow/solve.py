"""How exflow is solved for a task: its objective, its cap, and what the cap costs.

Legend: L MoE layers; E experts; K experts a token; D devices.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ....solvers import eplb, exflow
from ....solvers.balance import balance
from ....solvers.exflow.strategy import ExflowResult
from ....solvers.outcome import Status
from ....solvers.placement import Placement
from ....traces.counts import Counts
from ...options import Cap
from ...task import Task
from ..registry import ExflowParams, Objective

__all__ = ["load_cap", "objective", "params_of", "place", "searched", "sought"]

FREE_SHARE = 0.2  # of the time limit, to see what a cap costs
EVEN = 1.05


def objective(task: Task) -> Objective:
    """Objective of a task: "hops", a token's first experts in all layers; "copies", pairs that save it copies.

    Hops are the default where tokens stay with their first expert, copies where they return home. Only annealing knows
    of copies, and of tokens with one expert each hops are all there is.

    Notes
    -----
    A token at the device h of its last first choice goes to the devices x(b_k) of its K experts b_1 .. b_K, and on from
    x(b_1). Its copies in a layer are

        dispatch = |{x(b_k)} - {h}|       <= K - sum_k [x(b_k) = h]                                             (1)
        combine  = |{x(b_k)} - {x(b_1)}|  >= K - 1 - sum_{j < k} [x(b_j) = x(b_k)]                              (2)

    equal where no two of its experts share a device other than h (1), and no three share one (2). What is subtracted
    is pairs, and these are the objective of coherent dispatch: the transitions from first choices to all K next ones,
    and the pairs inside layers. Where tokens return home it is the pairs inside layers alone.
    """
    wanted = params_of(task).objective or ("copies" if task.dispatch_model == "standard" else "hops")
    return wanted if params_of(task).method == "annealing" and task.model.top_k > 1 else "hops"


def sought(counts: Counts, task: Task) -> tuple[NDArray[np.number], NDArray[np.number] | None]:
    """The transitions and the coactivation that the solver is to keep together for a task's objective."""
    copies = objective(task) == "copies"
    at_home = copies and task.dispatch_model == "standard"
    if not at_home:
        task.trace.check_first_choices("--objective hops")
    transitions = np.zeros_like(counts.transitions) if at_home else counts.transitions
    return transitions, counts.coactivation if copies else None


def place(counts: Counts, task: Task, slots: NDArray[np.int64], *, work: float | None = None) -> ExflowResult:
    """Place by the task's objective, within its cap; `work` as `solvers.exflow` takes it."""
    return _solve(counts, task, slots, load_cap(counts, task, slots), params_of(task).time_limit_s, work)


def searched(counts: Counts, task: Task, slots: NDArray[np.int64]) -> tuple[ExflowResult, Cap | None]:
    """Place as `place` does, and what a cap cost."""
    limit_s, most = params_of(task).time_limit_s, load_cap(counts, task, slots)
    result = _solve(counts, task, slots, most, limit_s * (1.0 if most is None else 1 - FREE_SHARE))
    if most is None or result.outcome.status is Status.INTERRUPTED:
        return result, None
    simple = dataclasses.replace(params_of(task), bound="simple")
    plain = dataclasses.replace(task, request=dataclasses.replace(task.request, params=simple))
    free = _solve(counts, plain, slots, None, limit_s * FREE_SHARE)
    highest = _highest(counts, free.placement)
    return result, Cap(max_load=most, objective_without=free.outcome.objective.value, highest_without=highest)


def _solve(
    counts: Counts,
    task: Task,
    slots: NDArray[np.int64],
    max_load: float | None,
    limit_s: float,
    work: float | None = None,
) -> ExflowResult:
    params, (transitions, coactivation) = params_of(task), sought(counts, task)
    return exflow.solve(
        transitions,
        task.request.cluster,
        coactivation=coactivation,
        loads=counts.loads,
        max_load=max_load,
        slots=slots,
        num_groups=task.model.num_expert_groups,
        groups=params.groups,
        method=params.method,
        backend=params.backend,
        time_limit_s=limit_s,
        work=work,
        bound=params.bound,
        seed=task.request.seed,
        on_bound=lambda share: task.say(f"bounding: at most {share:.2%} of transitions stay"),
    )


def load_cap(counts: Counts, task: Task, slots: NDArray[np.int64]) -> float | None:
    """The cap on a device's share of a layer: as asked for; of copies at home, without replicas, as even as EPLB packs.

    Notes
    -----
    That is the most that EPLB has in any layer, so that there is a placement, and EVEN at least. Experts that one token
    takes together are busy in the same steps, so that steps are less even than these loads: looser caps cost there.
    """
    params, num_experts = params_of(task), counts.loads.shape[1]
    at_home = task.dispatch_model == "standard" and objective(task) == "copies" and params.groups == "split"
    if params.max_load is not None or not at_home or slots.sum() > num_experts or slots.max() == 1:
        return params.max_load
    return max(
        EVEN,
        _highest(counts, eplb.solve(counts.loads, task.request.cluster, slots=slots, method="published").placement),
    )


def _highest(counts: Counts, placement: Placement) -> float:
    """The most load of a device in any layer, over the mean, replicas sharing alike."""
    layers = zip(counts.loads.astype(np.float64), placement.physical_to_logical, strict=True)
    return max(
        balance(load_E[None], dataclasses.replace(placement, physical_to_logical=expert_P[None]))
        for load_E, expert_P in layers
    )


def params_of(task: Task) -> ExflowParams:
    """Parameters of exflow in a task."""
    assert isinstance(task.params, ExflowParams)
    return task.params
