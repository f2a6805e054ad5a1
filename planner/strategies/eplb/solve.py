"""How eplb is solved for a task: step by step where steps differ, else by all loads together.

Legend: B steps; L MoE layers; E experts; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....solvers import eplb
from ....solvers.balance import step_balance
from ....solvers.outcome import PlacementResult
from ....traces.counts import Counts
from ...task import Task
from .params import EplbParams

__all__ = ["has_steps", "params_of", "place", "solved", "steps_decide"]

TRIAL_LAYERS = 8


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place as asked for: step by step where recorded steps differ by more than chance, else by all loads together."""
    loads, quantile = counts.loads, params_of(task).quantile
    if task.request.mixture and quantile is not None:
        raise UsageError("--quantile with several --trace, which are balanced together; leave it out")
    if has_steps(task):
        if steps_decide(task.fitted_steps, task, slots):
            loads = task.fitted_steps
    elif quantile is not None:
        raise UsageError(f"--quantile of steps, and {task.source.path} has none recorded; leave it out")
    return solved(loads, task, slots)


def params_of(task: Task) -> EplbParams:
    """Parameters of eplb in a task."""
    assert isinstance(task.params, EplbParams)
    return task.params


def solved(loads: NDArray[np.integer], task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """The placement by loads `[L, E]`, or `[B, L, E]` step by step, as a task asks for it."""
    params = params_of(task)
    return eplb.solve(
        loads,
        task.request.cluster,
        slots=slots,
        num_groups=task.model.num_expert_groups,
        method=params.method,
        groups=params.groups,
        dead=params.dead,
        pins=params.pins,
        quantile=params.quantile,
    )


def has_steps(task: Task) -> bool:
    """Whether a placement may go by steps: they are recorded, and of one trace."""
    return task.units.has_steps and params_of(task).method != "published" and not task.request.mixture


def steps_decide(loads_BLE: NDArray[np.int64], task: Task, slots: NDArray[np.int64]) -> bool:
    """Whether steps, not their sum, are to be made even: asked for by a quantile, or unlike by more than chance.

    They are where placing some layers by every other step makes the steps between more even than placing by their sum.
    """
    if params_of(task).quantile is not None:
        return True
    trial_BLE = loads_BLE[:, :: -(-loads_BLE.shape[1] // TRIAL_LAYERS)]
    fitted_BLE, between_BLE = trial_BLE[::2], trial_BLE[1::2]
    by_step, by_sum = (
        step_balance(between_BLE.astype(np.float64), solved(loads, task, slots).placement) if len(between_BLE) else 1.0
        for loads in (fitted_BLE, fitted_BLE.sum(axis=0))
    )
    return by_step <= by_sum
