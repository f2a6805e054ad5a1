"""A plan made on one phase and judged on another: whether prefill and decode want plans of their own.

Legend: B steps; L MoE layers; E experts; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from ....solvers import contiguous
from ....solvers.placement import Placement
from ...evaluate.loads import device_loads, step_loads
from ...evaluate.metrics import max_over_mean
from ...options import PhaseSwap
from ...request import Phase
from ...task import Task
from .solve import has_steps, solved, steps_decide

__all__ = ["phase_swaps"]

PAIR: tuple[Phase, Phase] = ("prefill", "decode")
Loads = NDArray[np.int64]


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


def _placed(loads_BLE: Loads, task: Task, slots: NDArray[np.int64]) -> Placement:
    """As a plan of that phase alone would be."""
    by_step = has_steps(task) and steps_decide(loads_BLE, task, slots)
    return solved(loads_BLE if by_step else loads_BLE.sum(axis=0), task, slots).placement


def _balance(loads_BLE: Loads, placement: Placement) -> float:
    found_BL = max_over_mean(device_loads(loads_BLE, placement)[:, :, placement.slots > 0])
    return float(found_BL[found_BL > 0].mean())
