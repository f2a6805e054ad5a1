"""How eplb is solved for a task: step by step where steps differ, else by all loads together; and phase by phase.

Legend: B steps; L MoE layers; E experts; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....solvers import contiguous, eplb
from ....solvers.balance import max_over_mean, step_balance
from ....solvers.outcome import PlacementResult
from ....solvers.placement import Placement
from ....traces.counts import Counts
from ...evaluate.loads import device_loads, step_loads
from ...options import PhaseSwap
from ...request import Phase
from ...task import Task
from ..registry import EplbParams

__all__ = ["params_of", "phase_swaps", "place"]

TRIAL_LAYERS = 8
PAIR: tuple[Phase, Phase] = ("prefill", "decode")


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


def phase_swaps(task: Task, slots: NDArray[np.int64]) -> tuple[PhaseSwap, ...]:
    """Either of two phases of a trace planned for and judged on the other; nothing where it has but one."""
    phases: list[Phase] = [phase for phase in PAIR if phase in task.units.phases]
    if len(phases) < 2 or task.request.phases or task.request.mixture or task.fitted.all():
        return ()
    task.say("planning for each phase alone")
    parts = {phase: step_loads(task.scene, phases=(phase,)) for phase in phases}
    if not all(loads_BLE.any() for part in parts.values() for loads_BLE in part):
        return ()
    plans = {phase: _placed(part[0], task, slots) for phase, part in parts.items()}
    model = task.model
    in_order = contiguous.solve(model.num_layers, model.num_experts, task.request.cluster, slots=slots).placement
    return tuple(
        PhaseSwap(
            made_on=made_on,
            judged_on=judged_on,
            balance=_balance(parts[judged_on][1], plans[made_on]),
            own=_balance(parts[judged_on][1], plans[judged_on]),
            in_order=_balance(parts[judged_on][1], in_order),
        )
        for made_on, judged_on in (phases, phases[::-1])
    )


def _placed(loads_BLE: NDArray[np.int64], task: Task, slots: NDArray[np.int64]) -> Placement:
    """As a plan of that phase alone would be."""
    by_step = has_steps(task) and steps_decide(loads_BLE, task, slots)
    return solved(loads_BLE if by_step else loads_BLE.sum(axis=0), task, slots).placement


def _balance(loads_BLE: NDArray[np.int64], placement: Placement) -> float:
    found_BL = max_over_mean(device_loads(loads_BLE, placement)[:, :, placement.slots > 0], idle=0.0)
    return float(found_BL[found_BL > 0].mean())
