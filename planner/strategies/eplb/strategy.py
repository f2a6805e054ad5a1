"""EPLB: replicas for the busiest experts, packed evenly, by steps where these differ (solvers/eplb).

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....runtime.decisions import DispatchModel
from ....solvers import eplb
from ....solvers.balance import step_balance
from ....solvers.outcome import PlacementResult
from ....traces.counts import Counts
from ...evaluate.evaluate import evaluate
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import BALANCE, EXPERTS, TAIL, Figures
from ...evaluate.price import STEP
from ...evaluate.scene import Scene
from ...options import Candidate, Member, Redundancy, TimedMetric
from ...task import Task
from ..placement import PlacementStrategy
from ..strategy import Solution
from . import EplbParams
from .recheck import recheck
from .sections import remarks, sections

TRIAL_LAYERS = 8
MOST_EXTRA = 4  # slots a device beyond the fewest
TIMES: tuple[TimedMetric, ...] = (STEP, EXPERTS)


class Eplb(PlacementStrategy):
    """Busy experts are replicated, and devices loaded evenly in every step."""

    name = "eplb"
    by_loads = True
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Balance, which is what it makes."""
        return BALANCE

    def place(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place by steps where recorded ones differ by more than chance, else by all loads together."""
        params, mixture = EplbParams.of(task.params), task.request.mixture
        if mixture and params.quantile is not None:
            raise UsageError("--quantile with several --trace, which are balanced together; leave it out")
        recorded = "step" in task.source.known
        if params.quantile is not None and not recorded:
            raise UsageError(f"--quantile of steps, and {task.source.path} has none recorded; leave it out")
        several = recorded and params.method != "published" and not mixture
        by_step = several and _steps_decide(task.fitted_steps, task, slots)
        return _solved(task.fitted_steps if by_step else counts.loads, task, slots)

    def weighed(self, counts: Counts, task: Task) -> Redundancy:
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
            placement = self.place(counts, task, _slots_of(slots, task)).placement
            contenders.append(Contender(str(slots), Journey(task.dispatch_model, placement)))
        judged = list(evaluate(task.scenes, contenders).judged.values())
        timed = [name for name in TIMES if all(name in figures.value for figures in judged)]
        candidates = [_candidate(slots, figures, timed[:1], task) for slots, figures in enumerate(judged, fewest)]
        return Redundancy(
            metric=timed[0] if timed else BALANCE,
            held_out=task.request.fit_fraction < 1,
            candidates=tuple(candidates),
        )

    def solve(self, task: Task) -> Solution:
        """Place the fitted units' experts, with as many replicas as asked for or as serve."""
        counts = task.counts
        redundancy = self.weighed(counts, task) if EplbParams.of(task.params).redundant == "auto" else None
        slots_D = task.slots if redundancy is None else _slots_of(redundancy.chosen.slots, task)
        task.say(f"solving {self.name}")
        mixture = tuple(
            Member(path=str(member.source.path), sha256=member.source.sha256, weight=weight)
            for weight, member in (task.members if task.request.mixture else ())
        )
        return self.solution(self.place(counts, task, slots_D), task, redundancy=redundancy, mixture=mixture)


def _solved(loads: NDArray[np.integer], task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """The placement by loads `[L, E]`, or `[B, L, E]` step by step, as a task asks for it."""
    params = EplbParams.of(task.params)
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


def _steps_decide(loads_BLE: NDArray[np.int64], task: Task, slots: NDArray[np.int64]) -> bool:
    """Choose to make steps even, not their sum: asked for by a quantile, or unlike by more than chance.

    They are where placing some layers by every other step makes the steps between more even than placing by their sum.
    """
    if EplbParams.of(task.params).quantile is not None:
        return True
    trial_BLE = loads_BLE[:, :: -(-loads_BLE.shape[1] // TRIAL_LAYERS)]
    fitted_BLE, between_BLE = trial_BLE[::2], trial_BLE[1::2]
    by_step, by_sum = (
        step_balance(between_BLE.astype(np.float64), _solved(loads, task, slots).placement) if len(between_BLE) else 1.0
        for loads in (fitted_BLE, fitted_BLE.sum(axis=0))
    )
    return by_step <= by_sum


def _slots_of(slots: int, task: Task) -> NDArray[np.int64]:
    """Slots of every device, as many on all that are alive, `[D]`."""
    slots_D = np.zeros(task.request.cluster.num_devices, np.int64)
    slots_D[task.alive] = slots
    return slots_D


def _fewest(task: Task) -> int:
    """Slots a device, with which all experts, and all that are pinned where they are, find a place."""
    pins, num_experts = {*EplbParams.of(task.params).pins}, task.model.num_experts
    on_device = Counter(device for _, device in pins)
    replicas = num_experts - len({expert for expert, _ in pins}) + len(pins)
    return min(max(-(-replicas // len(task.alive)), *on_device.values(), 1), num_experts)


def _candidate(slots: int, figures: Figures, timed: list[TimedMetric], task: Task) -> Candidate:
    if BALANCE not in figures.value:
        raise UsageError("--redundant auto: no step that judges routes a token; expected some: record more")
    each = task.model.expert_bytes
    return Candidate(
        redundant=slots * len(task.alive) - task.model.num_experts,
        slots=slots,
        balance=figures.value[BALANCE],
        balance_p95=figures.value[TAIL],
        seconds=figures.value[timed[0]] if timed else None,
        memory_bytes=None if each is None else slots * task.model.num_layers * each,
    )


STRATEGY = Eplb()
