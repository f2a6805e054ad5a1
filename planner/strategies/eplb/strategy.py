"""EPLB: replicas for the busiest experts, packed evenly, by steps where these differ (solvers/eplb).

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError
from ....runtime.decisions import DispatchModel
from ....solvers import contiguous, eplb
from ....solvers.balance import balance, max_over_mean, step_balance
from ....solvers.outcome import PlacementResult
from ....solvers.placement import Placement
from ....traces.counts import Counts
from ...evaluate.evaluate import evaluate
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import BALANCE, EXPERTS, TAIL, Figures
from ...evaluate.price import STEP
from ...evaluate.replay import step_loads
from ...evaluate.scene import Scene
from ...evaluate.tally import device_loads
from ...moves import expert_bytes
from ...options import Candidate, Member, PhaseSwap, RawBalance, Redundancy, TimedMetric
from ...request import Phase
from ...task import Task
from ..placement import PlacementStrategy, published
from ..strategy import Solution
from . import EplbParams
from .recheck import recheck
from .sections import remarks, sections

__all__ = ["STRATEGY"]

TRIAL_LAYERS = 8
MOST_EXTRA = 4  # slots a device beyond the fewest
TIMES: tuple[TimedMetric, ...] = (STEP, EXPERTS)
PAIR: tuple[Phase, Phase] = ("prefill", "decode")


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
        loads, quantile = counts.loads, _params_of(task).quantile
        if task.request.mixture and quantile is not None:
            raise UsageError("--quantile with several --trace, which are balanced together; leave it out")
        if _has_steps(task):
            if _steps_decide(task.fitted_steps, task, slots):
                loads = task.fitted_steps
        elif quantile is not None:
            raise UsageError(f"--quantile of steps, and {task.source.path} has none recorded; leave it out")
        return _solved(loads, task, slots)

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
        redundancy = self.weighed(counts, task) if _params_of(task).redundant == "auto" else None
        slots_D = task.slots if redundancy is None else _slots_of(redundancy.chosen.slots, task)
        task.say(f"solving {self.name}")
        placed = self.place(counts, task, slots_D)
        mixed = task.members if task.request.mixture else []
        return self.solution(
            placed,
            task,
            raw=_raw(placed, counts, task, slots_D),
            redundancy=redundancy,
            swaps=_phase_swaps(task, slots_D),
            mixture=tuple(
                Member(path=str(one.source.path), sha256=one.source.sha256, weight=weight) for weight, one in mixed
            ),
        )


def _params_of(task: Task) -> EplbParams:
    assert isinstance(task.params, EplbParams)
    return task.params


def _solved(loads: NDArray[np.integer], task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """The placement by loads `[L, E]`, or `[B, L, E]` step by step, as a task asks for it."""
    params = _params_of(task)
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


def _has_steps(task: Task) -> bool:
    """Whether a placement may go by steps: they are recorded, and of one trace."""
    return "step" in task.source.known and _params_of(task).method != "published" and not task.request.mixture


def _steps_decide(loads_BLE: NDArray[np.int64], task: Task, slots: NDArray[np.int64]) -> bool:
    """Whether steps, not their sum, are to be made even: asked for by a quantile, or unlike by more than chance.

    They are where placing some layers by every other step makes the steps between more even than placing by their sum.
    """
    if _params_of(task).quantile is not None:
        return True
    trial_BLE = loads_BLE[:, :: -(-loads_BLE.shape[1] // TRIAL_LAYERS)]
    fitted_BLE, between_BLE = trial_BLE[::2], trial_BLE[1::2]
    by_step, by_sum = (
        step_balance(between_BLE.astype(np.float64), _solved(loads, task, slots).placement) if len(between_BLE) else 1.0
        for loads in (fitted_BLE, fitted_BLE.sum(axis=0))
    )
    return by_step <= by_sum


def _phase_swaps(task: Task, slots: NDArray[np.int64]) -> tuple[PhaseSwap, ...]:
    """Plans for each of two phases judged on the other; none where the trace has but one phase."""
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
    by_step = _has_steps(task) and _steps_decide(loads_BLE, task, slots)
    return _solved(loads_BLE if by_step else loads_BLE.sum(axis=0), task, slots).placement


def _balance(loads_BLE: NDArray[np.int64], placement: Placement) -> float:
    balance_BL = max_over_mean(device_loads(loads_BLE, placement)[:, :, placement.slots > 0], idle=0.0)
    return float(balance_BL[balance_BL > 0].mean())


def _slots_of(slots: int, task: Task) -> NDArray[np.int64]:
    """Slots of every device, as many on all that are alive, `[D]`."""
    slots_D = np.zeros(task.request.cluster.num_devices, np.int64)
    slots_D[task.alive] = slots
    return slots_D


def _fewest(task: Task) -> int:
    """Slots a device, with which all experts, and all that are pinned where they are, find a place."""
    pins, num_experts = {*_params_of(task).pins}, task.model.num_experts
    on_device = Counter(device for _, device in pins)
    replicas = num_experts - len({expert for expert, _ in pins}) + len(pins)
    return min(max(-(-replicas // len(task.alive)), *on_device.values(), 1), num_experts)


def _candidate(slots: int, figures: Figures, timed: list[TimedMetric], task: Task) -> Candidate:
    if BALANCE not in figures.value:
        raise UsageError("--redundant auto: no step that judges routes a token; expected some: record more")
    each = expert_bytes(task.model)
    return Candidate(
        redundant=slots * len(task.alive) - task.model.num_experts,
        slots=slots,
        balance=figures.value[BALANCE],
        balance_p95=figures.value[TAIL],
        seconds=figures.value[timed[0]] if timed else None,
        memory_bytes=None if each is None else slots * task.model.num_layers * each,
    )


def _raw(placed: PlacementResult, counts: Counts, task: Task, slots: NDArray[np.int64]) -> RawBalance:
    """Balance of the published algorithm unrepaired, repaired, and of the plan, on the summed fitted loads."""
    groups = task.model.num_expert_groups
    raw = eplb.raw_balance(counts.loads, task.request.cluster, slots=slots, num_groups=groups)
    loads = counts.loads.astype(np.float64)
    repaired, plan = (balance(loads, one.placement) for one in (published(counts, task, slots), placed))
    return RawBalance(balance=raw.balance, duplicates=raw.duplicates, repaired=repaired, plan=plan)


STRATEGY = Eplb()
