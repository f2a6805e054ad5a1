"""Re-planning from the plan in force (`--from`): few experts move, and what moving them takes and gives is told."""

import dataclasses
from pathlib import Path

from ..errors import UsageError
from ..profilers.cluster import Cluster
from ..runtime.plan import Part, Plan, load
from ..solvers.exflow.replan import reconsider
from ..solvers.moves import experts_moved
from ..solvers.placement import Placement
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from ..traces.model import ModelSpec
from .evaluate import Evaluated, verdict
from .options import Replanned
from .tally import Route
from .task import Task

__all__ = ["previous_plan", "previous_routes", "reconsidered", "replanned", "without_previous"]

NAME = "previous"
MATRICES = 3  # of an expert, each hidden x ffn: gate, up and down


def previous_plan(path: Path, cluster: Cluster) -> Plan:
    """The plan in force: a placement for this cluster and nothing that rests on it."""
    plan = load(path)
    if plan.decisions.names != ("placement",):
        raise UsageError(
            f"--from {path}: it decides {' and '.join(plan.decisions.names) or 'nothing'}; expected a placement alone:"
            " re-plan the plan that it stands on, then add the rest again with --on"
        )
    if str(plan.cluster) != str(cluster):
        raise UsageError(f"--from {path}: a plan for {plan.cluster}, asked for {cluster}; leave --cluster away")
    return plan


def reconsidered(found: PlacementResult, counts: Counts, task: Task) -> PlacementResult:
    """What was found, with devices named so that few experts move, or less where moving does not pay in time.

    Notes
    -----
    A token that stays saves one hidden vector of M elements, a move takes 3 M H of them. With T fitted tokens standing
    for the `horizon` to come, a move costs as much as 3 H T / horizon transitions are worth.
    """
    old, horizon = _placement(task), task.request.horizon_tokens
    if old is None:
        return found
    price = 0.0 if horizon is None else _vectors_a_move(task.trace.model) * counts.num_tokens / horizon
    limit = task.request.time_limit_s
    return reconsider(counts.transitions, task.request.cluster, found, old, price=price, time_limit_s=limit)


def previous_routes(task: Task) -> list[Route]:
    """The plan in force, to be replayed beside the new one."""
    old = _placement(task)
    return [] if old is None or task.previous is None else [Route(NAME, task.previous.dispatch_model, old)]


def replanned(placement: Placement, evaluated: Evaluated, task: Task) -> Replanned | None:
    """What replacing the plan in force takes and gives; None where there is none."""
    old, plan, model = _placement(task), task.previous, task.trace.model
    if old is None or plan is None:
        return None
    label = f"{NAME}/{plan.dispatch_model}"
    ours = next(iter(evaluated.judged.values()))
    moved = int(experts_moved(placement, old).sum())
    return Replanned(
        plan_sha256=plan.plan_sha256,
        experts_moved=moved,
        experts_held=placement.num_slots * placement.num_layers,
        bytes_moved=moved * _vectors_a_move(model) * model.copy_bytes if model.ffn_size and model.copy_bytes else None,
        horizon_tokens=task.request.horizon_tokens,
        verdict=verdict(evaluated, "device_copies", label),
        paid_back_tokens=_paid_back(moved, ours.gain("device_copies", evaluated.judged[label]).value, model),
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
