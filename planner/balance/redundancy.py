"""How many redundant experts serve: balance and predicted time against what they weigh, on the part that judges.

Legend: L MoE layers; E experts; D devices.
"""

from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...solvers.result import PlacementResult
from ...traces.counts import Counts
from ..balance_options import Candidate, Redundancy
from ..expert_bytes import expert_bytes
from ..measures.metrics import Figures
from ..measures.tally import Route
from ..request import Request
from ..task import Task
from .mixture import Mixture

__all__ = ["slots_of", "weighed"]

MOST_EXTRA = 4  # slots a device beyond the fewest
Place = Callable[[Counts, Task, NDArray[np.int64]], PlacementResult]  # `planner.placing`
TIMES: tuple[Literal["step_s", "experts_s"], ...] = ("step_s", "experts_s")


def weighed(place: Place, counts: Counts, mixture: Mixture) -> Redundancy:
    """Placements with up to 4 extra slots a device, side by side on the part that judges.

    Raises
    ------
    UsageError
        No token of that part is routed.
    """
    task = mixture.task
    request, model = task.request, task.model
    fewest = _fewest(model.num_experts, request)
    most = min(fewest + MOST_EXTRA, model.num_experts)
    routes = []
    for slots in range(fewest, most + 1):
        task.say(f"weighing {slots} slots a device, of {fewest} to {most}")
        placement = place(counts, task, slots_of(slots, request)).placement
        routes.append(Route(str(slots), task.dispatch_model, placement))
    found = list(mixture.evaluate(routes).judged.values())
    timed = [name for name in TIMES if all(name in one.value for one in found)]
    return Redundancy(
        metric=timed[0] if timed else "balance",
        held_out=request.fit_fraction < 1,
        candidates=tuple(
            _candidate(slots, one, timed[:1], task) for slots, one in zip(range(fewest, most + 1), found, strict=True)
        ),
    )


def slots_of(slots: int, request: Request) -> NDArray[np.int64]:
    """So many slots on every device that is alive, `[D]`."""
    slots_D = np.zeros(request.cluster.num_devices, np.int64)
    slots_D[request.alive] = slots
    return slots_D


def _fewest(num_experts: int, request: Request) -> int:
    """Slots a device, with which all experts, and all that are pinned where they are, find a place."""
    pins = {*request.pins}
    on_device = Counter(device for _, device in pins)
    replicas = num_experts - len({expert for expert, _ in pins}) + len(pins)
    return min(max(-(-replicas // len(request.alive)), *on_device.values(), 1), num_experts)


def _candidate(slots: int, figures: Figures, timed: list[Literal["step_s", "experts_s"]], task: Task) -> Candidate:
    if "balance" not in figures.value:
        raise UsageError("--redundant auto: no step that judges routes a token; expected some: record more")
    one = expert_bytes(task.model)
    return Candidate(
        redundant=slots * len(task.request.alive) - task.model.num_experts,
        slots=slots,
        balance=figures.value["balance"],
        balance_p95=figures.value["balance_p95"],
        seconds=figures.value[timed[0]] if timed else None,
        memory_bytes=None if one is None else slots * task.model.num_layers * one,
    )
