"""Re-planning from the plan in force (`--from`): few experts move, and what moving them takes and gives is told."""

import dataclasses

from ..errors import UsageError
from ..runtime.plan import Part, Plan, load
from ..solvers.exflow.replan import reconsider
from ..solvers.placement import Placement
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from ..traces.model import ModelSpec
from . import exflow
from .evaluate import Evaluated, verdict
from .expert_bytes import MATRICES
from .expert_moves import Moves
from .measures.metrics import copies_metric
from .measures.tally import Route
from .options import Replanned
from .request import Request
from .task import Task

__all__ = ["check_horizon", "previous_plan", "previous_routes", "reconsidered", "replanned", "without_previous"]

NAME = "previous"
MOVES_SHARE = 0.1  # of the time limit, after it


def previous_plan(request: Request) -> Plan | None:
    """The plan in force, where there is one: a placement for this cluster and nothing that rests on it."""
    if (path := request.previous) is None:
        return None
    plan = load(path)
    if plan.decisions.names != ("placement",):
        raise UsageError(
            f"--from {path}: it decides {' and '.join(plan.decisions.names) or 'nothing'}; expected a placement alone:"
            " re-plan the plan that it stands on, then add the rest again with --on"
        )
    if str(plan.cluster) != str(request.cluster):
        raise UsageError(f"--from {path}: a plan for {plan.cluster}, asked for {request.cluster}; leave --cluster away")
    return plan


def check_horizon(task: Task) -> None:
    """Refuse a horizon where nothing says what experts weigh; before the search."""
    if task.request.horizon_tokens is not None:
        _vectors_a_move(task.model)


def reconsidered(found: PlacementResult, counts: Counts, task: Task) -> PlacementResult:
    """What was found, or a placement near the plan in force that is worth about as much, or less where moves cost.

    Notes
    -----
    A move takes 3 M H elements, with M the ffn_size and H the hidden_size. What stays saves one vector, under standard
    dispatch of copies a vector there and one back. With T fitted tokens standing for the `horizon` to come, a move
    costs as much as 3 M T / horizon vectors are worth.
    """
    old, request = _placement(task), task.request
    if old is None:
        return found
    price, horizon = 0.0, request.horizon_tokens
    if horizon is not None:
        saved = 2 if task.dispatch_model == "standard" and exflow.objective(task) == "copies" else 1
        price = _vectors_a_move(task.model) * counts.num_tokens / horizon / saved
    task.say("weighing moves from the plan in force")
    transitions, coactivation = exflow.sought(counts, task)
    return reconsider(
        transitions,
        request.cluster,
        found,
        old,
        coactivation=coactivation,
        loads=counts.loads,
        max_load=exflow.load_cap(counts, task, found.placement.slots),
        price=price,
        time_limit_s=MOVES_SHARE * request.time_limit_s,
        seed=request.seed,
    )


def previous_routes(task: Task) -> list[Route]:
    """The plan in force, to be replayed beside the new one."""
    old = _placement(task)
    return [] if old is None or task.previous is None else [Route(NAME, task.previous.dispatch_model, old)]


def replanned(placement: Placement, evaluated: Evaluated, task: Task) -> Replanned | None:
    """What replacing the plan in force takes and gives; None where there is none."""
    old, plan, model = _placement(task), task.previous, task.model
    if old is None or plan is None:
        return None
    label = f"{NAME}/{plan.dispatch_model}"
    ours = next(iter(evaluated.judged.values()))
    moves = Moves.between(old, placement, model)
    return Replanned(
        plan_sha256=plan.plan_sha256,
        experts_moved=moves.experts,
        experts_held=moves.held,
        bytes_moved=moves.num_bytes,
        horizon_tokens=task.request.horizon_tokens,
        verdict=verdict(evaluated, copies_metric(task.dispatch_model, task.request.cluster), label),
        paid_back_tokens=_paid_back(moves.experts, ours.gain("device_copies", evaluated.judged[label]).value, model),
    )


def without_previous(evaluated: Evaluated) -> Evaluated:
    """An evaluation of the plan and its baselines alone, which nothing but their trace is needed to make again."""
    parts = {"fit": evaluated.evaluation.fit, "held_out": evaluated.evaluation.held_out}
    kept = {name: None if part is None else _kept(part) for name, part in parts.items()}
    return dataclasses.replace(evaluated, evaluation=evaluated.evaluation.model_copy(update=kept))


def _kept(part: Part) -> Part:
    return part.model_copy(update={"contenders": tuple(one for one in part.contenders if one.name != NAME)})


def _placement(task: Task) -> Placement | None:
    """Where experts are now."""
    return None if task.previous is None else task.previous.placement


def _vectors_a_move(model: ModelSpec) -> int:
    """Hidden vectors that weigh as much as an expert."""
    if model.ffn_size is None:
        raise UsageError("--horizon weighs experts, and the trace does not say their ffn_size; import with --ffn-size")
    return MATRICES * model.ffn_size


def _paid_back(moved: int, copies: float, model: ModelSpec) -> float | None:
    """Tokens whose copies, so many fewer a token and layer, weigh as much as the experts moved."""
    if model.ffn_size is None or copies <= 0:
        return None
    return moved * _vectors_a_move(model) / (copies * model.num_layers)
