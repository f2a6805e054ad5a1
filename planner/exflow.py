"""ExFlow: experts that follow each other, or serve the same tokens, live together (solvers/exflow).

Legend: L MoE layers; E experts; D devices.
"""

import dataclasses
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..solvers import eplb, exflow
from ..solvers.balance import balance
from ..solvers.exflow.strategy import ExflowResult, Method
from ..solvers.outcome import Status
from ..solvers.placement import Placement
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .options import Cap, Search, StageHops
from .task import Task

__all__ = ["counts_pairs", "place", "searched"]

FREE_SHARE = 0.2  # of the time limit, to see what a cap costs
EVEN = 1.05


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the top-1 transitions between layers, or, where tokens return home, by the pairs inside layers."""
    cap = _max_load(counts, task, slots)
    limit_s = task.request.time_limit_s * (1.0 if cap is None else 1 - FREE_SHARE)
    return _solve(counts, task, slots, cap, limit_s)


def counts_pairs(task: Task) -> bool:
    """Whether a task is about pairs of experts of one layer: tokens return home, and each takes several experts.

    Only annealing knows of pairs; the other methods keep transitions whatever the dispatch.
    """
    return task.dispatch_model == "standard" and task.method == "annealing" and task.trace.model.top_k > 1


def searched(counts: Counts, task: Task, slots: NDArray[np.int64], found: PlacementResult) -> Search | None:
    """How `place` came to what it found, and what a cap cost it; None of another strategy's result."""
    if not isinstance(found, ExflowResult):
        return None
    cap, most = None, _max_load(counts, task, slots)
    if most is not None and found.outcome.status is not Status.INTERRUPTED:
        plain = dataclasses.replace(task, request=dataclasses.replace(task.request, bound="simple"))
        free = _solve(counts, plain, slots, None, task.request.time_limit_s * FREE_SHARE)
        highest = _highest(counts, free.placement)
        cap = Cap(max_load=most, objective_without=free.outcome.objective.value, highest_without=highest)
    stages = tuple(StageHops(**dataclasses.asdict(stage)) for stage in found.stages)
    return Search(bound=task.request.bound, compiled_s=found.compiled_s, stages=stages, cap=cap)


def _solve(
    counts: Counts, task: Task, slots: NDArray[np.int64], max_load: float | None, limit_s: float
) -> ExflowResult:
    request, paired = task.request, counts_pairs(task)
    return exflow.solve(
        np.zeros_like(counts.transitions) if paired else counts.transitions,
        request.cluster,
        coactivation=counts.coactivation if paired else None,
        loads=counts.loads,
        max_load=max_load,
        slots=slots,
        method=cast(Method, task.method),
        backend=request.backend,
        time_limit_s=limit_s,
        bound=request.bound,
        seed=request.seed,
        on_bound=lambda share: task.say(f"bounding: at most {share:.2%} of transitions stay"),
    )


def _max_load(counts: Counts, task: Task, slots: NDArray[np.int64]) -> float | None:
    """The cap on a device's share of a layer: as asked for; for pairs, without replicas, as even as EPLB packs.

    Notes
    -----
    That is the most that EPLB has in any layer, so that there is a placement, and EVEN at least. Experts that one token
    takes together are busy in the same steps, so that steps are less even than these loads: looser caps cost there.
    """
    request, num_experts = task.request, counts.loads.shape[1]
    if request.max_load is not None or not counts_pairs(task) or slots.sum() > num_experts or slots.max() == 1:
        return request.max_load
    return max(EVEN, _highest(counts, eplb.solve(counts.loads, request.cluster, slots=slots).placement))


def _highest(counts: Counts, placement: Placement) -> float:
    """The most load of a device in any layer, over the mean, replicas sharing alike."""
    layers = zip(counts.loads.astype(np.float64), placement.physical_to_logical, strict=True)
    return max(
        balance(load_E[None], dataclasses.replace(placement, physical_to_logical=expert_P[None]))
        for load_E, expert_P in layers
    )
