"""EPLB: replicas for the busiest experts, packed evenly (solvers/eplb).

Legend: B steps; L MoE layers; E experts; D devices.
"""

from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...solvers import eplb
from ...solvers.balance import balance, step_balance
from ...solvers.result import PlacementResult
from ...traces.counts import Counts
from ..balance_options import RawBalance
from ..task import Task
from .balanced import Balanced

__all__ = ["balanced", "has_steps", "place", "solved", "steps_decide"]

Method = Literal["refined", "published"]
TRIAL_LAYERS = 8


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the loads of every layer as published, expert groups on nodes where the model has them."""
    groups = task.model.num_expert_groups
    return eplb.solve(counts.loads, task.request.cluster, slots=slots, num_groups=groups, method="published")


def balanced(counts: Counts, task: Task, slots: NDArray[np.int64]) -> Balanced:
    """Place as asked for: step by step where recorded steps differ by more than chance, else by all loads together."""
    loads, request = counts.loads, task.request
    if has_steps(task):
        if steps_decide(task.fitted_steps, task, slots):
            loads = task.fitted_steps
    elif request.quantile is not None:
        raise UsageError(f"--quantile of steps, and {task.source.path} has none recorded; leave it out")
    found = solved(loads, task, slots)
    return Balanced(found.placement, found.outcome, found.repaired, raw=_raw(found, counts, task, slots))


def solved(loads: NDArray[np.integer], task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """The placement by loads `[L, E]`, or `[B, L, E]` step by step, as a task asks for it."""
    request = task.request
    return eplb.solve(
        loads,
        request.cluster,
        slots=slots,
        num_groups=task.model.num_expert_groups,
        method=cast(Method, task.method),
        groups=request.groups,
        dead=request.dead,
        pins=request.pins,
        quantile=request.quantile,
    )


def has_steps(task: Task) -> bool:
    """Whether a placement may go by steps: they are recorded, and of one trace."""
    return task.surveyed.steps is not None and task.method != "published" and not task.request.mixture


def steps_decide(loads_BLE: NDArray[np.int64], task: Task, slots: NDArray[np.int64]) -> bool:
    """Whether steps, not their sum, are to be made even: asked for by a quantile, or unlike by more than chance.

    They are where placing some layers by every other step makes the steps between more even than placing by their sum.
    """
    if task.request.quantile is not None:
        return True
    trial_BLE = loads_BLE[:, :: -(-loads_BLE.shape[1] // TRIAL_LAYERS)]
    fitted_BLE, between_BLE = trial_BLE[::2], trial_BLE[1::2]
    by_step, by_sum = (
        step_balance(between_BLE.astype(np.float64), solved(loads, task, slots).placement) if len(between_BLE) else 1.0
        for loads in (fitted_BLE, fitted_BLE.sum(axis=0))
    )
    return by_step <= by_sum


def _raw(found: PlacementResult, counts: Counts, task: Task, slots: NDArray[np.int64]) -> RawBalance:
    """What the published algorithm gives unrepaired, beside the plan, on the fitted loads together."""
    groups = task.model.num_expert_groups
    raw = eplb.raw_balance(counts.loads, task.request.cluster, slots=slots, num_groups=groups)
    loads = counts.loads.astype(np.float64)
    repaired, plan = (balance(loads, one.placement) for one in (place(counts, task, slots), found))
    return RawBalance(balance=raw.balance, duplicates=raw.duplicates, repaired=repaired, plan=plan)
