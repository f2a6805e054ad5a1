"""How many redundant experts serve: balance and predicted time against what they weigh, on the part that judges.

Legend: L MoE layers; E experts; D devices.
"""

from collections import Counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....traces.counts import Counts
from ...evaluate.evaluate import evaluate
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import BALANCE, EXPERTS, TAIL, Figures
from ...evaluate.price import STEP
from ...moves import expert_bytes
from ...options import Candidate, Redundancy
from ...task import Task
from .solve import params_of, place

__all__ = ["slots_of", "weighed"]

MOST_EXTRA = 4  # slots a device beyond the fewest
TIMES: tuple[Literal["step_s", "experts_s"], ...] = (STEP, EXPERTS)


def weighed(counts: Counts, task: Task) -> Redundancy:
    """Placements with up to 4 extra slots a device, side by side on the part that judges.

    Raises
    ------
    UsageError
        No token of that part is routed.
    """
    fewest = _fewest(task)
    most = min(fewest + MOST_EXTRA, task.model.num_experts)
    contenders = []
    for slots in range(fewest, most + 1):
        task.say(f"weighing {slots} slots a device, of {fewest} to {most}")
        placement = place(counts, task, slots_of(slots, task)).placement
        contenders.append(Contender(str(slots), Journey(task.dispatch_model, placement)))
    found = list(evaluate(task.scenes, contenders).judged.values())
    timed = [name for name in TIMES if all(name in one.value for one in found)]
    return Redundancy(
        metric=timed[0] if timed else BALANCE,
        held_out=task.request.fit_fraction < 1,
        candidates=tuple(
            _candidate(slots, one, timed[:1], task) for slots, one in zip(range(fewest, most + 1), found, strict=True)
        ),
    )


def slots_of(slots: int, task: Task) -> NDArray[np.int64]:
    """So many slots on every device that is alive, `[D]`."""
    slots_D = np.zeros(task.request.cluster.num_devices, np.int64)
    slots_D[task.alive] = slots
    return slots_D


def _fewest(task: Task) -> int:
    """Slots a device, with which all experts, and all that are pinned where they are, find a place."""
    pins, num_experts = {*params_of(task).pins}, task.model.num_experts
    on_device = Counter(device for _, device in pins)
    replicas = num_experts - len({expert for expert, _ in pins}) + len(pins)
    return min(max(-(-replicas // len(task.alive)), *on_device.values(), 1), num_experts)


def _candidate(slots: int, figures: Figures, timed: list[Literal["step_s", "experts_s"]], task: Task) -> Candidate:
    if BALANCE not in figures.value:
        raise UsageError("--redundant auto: no step that judges routes a token; expected some: record more")
    one = expert_bytes(task.model)
    return Candidate(
        redundant=slots * len(task.alive) - task.model.num_experts,
        slots=slots,
        balance=figures.value[BALANCE],
        balance_p95=figures.value[TAIL],
        seconds=figures.value[timed[0]] if timed else None,
        memory_bytes=None if one is None else slots * task.model.num_layers * one,
    )
