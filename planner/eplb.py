"""EPLB: replicas for the busiest experts, packed evenly (solvers/eplb).

Legend: B steps; L MoE layers; E experts; D devices.
"""

from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..solvers import eplb
from ..solvers.balance import balance
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .balance_options import RawBalance
from .balanced import Balanced
from .evaluate import cohorts_of
from .step_loads import step_loads
from .task import Task

__all__ = ["balanced", "place", "solved"]

Method = Literal["refined", "published"]


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the loads of every layer as published, expert groups on nodes where the model has them."""
    groups = task.model.num_expert_groups
    return eplb.solve(counts.loads, task.request.cluster, slots=slots, num_groups=groups, method="published")


def balanced(counts: Counts, task: Task, slots: NDArray[np.int64]) -> Balanced:
    """Place as asked for: by the loads of the fitted steps where steps are recorded, else by all loads together."""
    loads, request = counts.loads, task.request
    if task.surveyed.steps is not None and task.method != "published" and not request.mixture:
        (loads,) = step_loads(task.source, cohorts_of(task)[:1], phases=request.phases or None)
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


def _raw(found: PlacementResult, counts: Counts, task: Task, slots: NDArray[np.int64]) -> RawBalance:
    """What the published algorithm gives unrepaired, beside the plan, on the fitted loads together."""
    groups = task.model.num_expert_groups
    raw = eplb.raw_balance(counts.loads, task.request.cluster, slots=slots, num_groups=groups)
    loads = counts.loads.astype(np.float64)
    repaired, plan = (balance(loads, one.placement) for one in (place(counts, task, slots), found))
    return RawBalance(balance=raw.balance, duplicates=raw.duplicates, repaired=repaired, plan=plan)
