"""Re-planning from the plan in force (`--from`): few experts move, and what moving them takes and gives is told."""

import dataclasses

import numpy as np

from ....errors import UsageError
from ....runtime.decisions import PlacementDecision
from ....solvers.exflow.replan import reconsider
from ....solvers.outcome import PlacementResult
from ....solvers.placement import Placement
from ....traces.counts import Counts
from ....traces.model import ModelSpec
from ...evaluate.evaluate import Evaluated, verdict
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import COPIES, copies_metric
from ...moves import MATRICES, Moves
from ...options import Replanned
from ...task import Task
from .solve import load_cap, objective, params_of, sought

__all__ = ["previous_contender", "reconsidered", "replanned", "vectors_a_move"]

NAME = "previous"
MOVES_SHARE = 0.1  # of the time limit, after it


def reconsidered(placed: PlacementResult, counts: Counts, task: Task) -> PlacementResult:
    """The placement, or one near the plan in force that is worth about as much, or less where moves cost.

    Notes
    -----
    A move takes 3 M H elements, with M the ffn_size and H the hidden_size. What stays saves one vector, under standard
    dispatch of copies a vector there and one back. With T fitted tokens standing for the `horizon` to come, a move
    costs as much as 3 M T / horizon vectors are worth.
    """
    old, request = _placement(task), task.request
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
    old = _placement(task)
    return [] if old is None or task.previous is None else [Contender(NAME, Journey(task.previous.dispatch_model, old))]


def replanned(decision: PlacementDecision, evaluated: Evaluated, task: Task) -> Replanned | None:
    """Cost and gain of replacing the plan in force. None where there is none."""
    old, plan, model = _placement(task), task.previous, task.model
    if old is None or plan is None:
        return None
    label = f"{NAME}/{plan.dispatch_model}"
    ours = next(iter(evaluated.judged.values()))
    new = dataclasses.replace(
        old, physical_to_logical=np.array(decision.physical_to_logical, np.int32), slots=task.slots
    )
    moves = Moves.between(old, new, model)
    return Replanned(
        plan_sha256=plan.plan_sha256,
        experts_moved=moves.experts,
        experts_held=moves.held,
        bytes_moved=moves.num_bytes,
        horizon_tokens=params_of(task).horizon_tokens,
        verdict=verdict(evaluated, copies_metric(task.dispatch_model, task.request.cluster), against=label),
        paid_back_tokens=_paid_back(moves.experts, ours.gain(COPIES, evaluated.judged[label]).value, model),
    )


def _placement(task: Task) -> Placement | None:
    """Where experts are now."""
    return None if task.previous is None else task.previous.placement


def vectors_a_move(model: ModelSpec) -> int:
    """Hidden vectors that weigh as much as an expert."""
    if model.ffn_size is None:
        raise UsageError("--horizon weighs experts, and the trace does not say their ffn_size; import with --ffn-size")
    return MATRICES * model.ffn_size


def _paid_back(moved: int, copies: float, model: ModelSpec) -> float | None:
    """Tokens whose copies, so many fewer a token and layer, weigh as much as the experts moved."""
    if model.ffn_size is None or copies <= 0:
        return None
    return moved * vectors_a_move(model) / (copies * model.num_layers)
