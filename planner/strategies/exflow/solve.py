"""Solving exflow for a task: its objective, its cap and what that costs, and few moves from the plan in force.

Legend: L MoE layers; E experts; K experts a token; D devices.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....runtime.decisions import PlacementDecision
from ....solvers import eplb, exflow
from ....solvers.balance import balance
from ....solvers.exflow.replan import reconsider
from ....solvers.exflow.strategy import ExflowResult
from ....solvers.outcome import PlacementResult, Status
from ....solvers.placement import Placement
from ....traces.counts import Counts
from ....traces.model import ModelSpec
from ...evaluate.evaluate import Evaluated, verdict
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import COPIES, copies_metric
from ...moves import MATRICES, Moves
from ...options import Cap, Replanned
from ...task import Task
from . import ExflowParams, Objective

__all__ = [
    "objective",
    "params_of",
    "place",
    "previous_contender",
    "reconsidered",
    "replanned",
    "searched",
    "vectors_a_move",
]

FREE_SHARE = 0.2  # of the time limit, to see what a cap costs
MOVES_SHARE = 0.1  # of the time limit, after it, to weigh moves from the plan in force
EVEN = 1.05
PREVIOUS = "previous"  # the contender of the plan in force


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


def reconsidered(placed: PlacementResult, counts: Counts, task: Task) -> PlacementResult:
    """The placement, or one near the plan in force that is worth about as much, or less where moves cost.

    Notes
    -----
    A move takes 3 M H elements, with M the ffn_size and H the hidden_size. What stays saves one vector, under standard
    dispatch of copies a vector there and one back. With T fitted tokens standing for the `horizon` to come, a move
    costs as much as 3 M T / horizon vectors are worth.
    """
    request, old = task.request, None if task.previous is None else task.previous.placement
    if old is None:
        return placed
    price, horizon = 0.0, params_of(task).horizon_tokens
    if horizon is not None:
        saved = 2 if task.dispatch_model == "standard" and objective(task) == "copies" else 1
        price = vectors_a_move(task.model) * counts.num_tokens / horizon / saved
    task.say("weighing moves from the plan in force")
    transitions, coactivation = sought(counts, task)
    return reconsider(
        transitions,
        request.cluster,
        placed,
        old,
        coactivation=coactivation,
        loads=counts.loads,
        max_load=load_cap(counts, task, placed.placement.slots),
        price=price,
        time_limit_s=MOVES_SHARE * params_of(task).time_limit_s,
        seed=request.seed,
    )


def previous_contender(task: Task) -> list[Contender]:
    """The plan in force, to be judged beside the new one."""
    plan = task.previous
    if plan is None or plan.placement is None:
        return []
    return [Contender(PREVIOUS, Journey(plan.dispatch_model, plan.placement))]


def replanned(decision: PlacementDecision, evaluated: Evaluated, task: Task) -> Replanned | None:
    """Cost and gain of replacing the plan in force. None where there is none."""
    plan, model = task.previous, task.model
    if plan is None or (old := plan.placement) is None:
        return None
    label = f"{PREVIOUS}/{plan.dispatch_model}"
    ours = next(iter(evaluated.judged.values()))
    new = dataclasses.replace(
        old, physical_to_logical=np.array(decision.physical_to_logical, np.int32), slots=task.slots
    )
    moves, copies = Moves.between(old, new, model), ours.gain(COPIES, evaluated.judged[label]).value
    saved = copies * model.num_layers if model.ffn_size is not None and copies > 0 else None
    return Replanned(
        plan_sha256=plan.plan_sha256,
        experts_moved=moves.experts,
        experts_held=moves.held,
        bytes_moved=moves.num_bytes,
        horizon_tokens=params_of(task).horizon_tokens,
        verdict=verdict(evaluated, copies_metric(task.dispatch_model, task.request.cluster), against=label),
        paid_back_tokens=None if saved is None else moves.experts * vectors_a_move(model) / saved,
    )


def vectors_a_move(model: ModelSpec) -> int:
    """Hidden vectors that weigh as much as an expert."""
    if model.ffn_size is None:
        raise UsageError("--horizon weighs experts, and the trace does not say their ffn_size; import with --ffn-size")
    return MATRICES * model.ffn_size
