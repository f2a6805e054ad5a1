"""EPLB: replicas for the busiest experts, packed evenly, by steps where these differ (solvers/eplb).

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ....errors import CertificationError, UsageError
from ....runtime.decisions import DispatchModel
from ....runtime.plan import Plan
from ....solvers import eplb
from ....solvers.arrays import Ints
from ....solvers.balance import balance, step_balance
from ....solvers.outcome import PlacementResult
from ....solvers.placement import Placement
from ....traces.counts import Counts
from ...certify.certificate import Certificate
from ...certify.recounted import count_fitted
from ...evaluate.evaluate import evaluate
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import BALANCE, EXPERTS, TAIL
from ...evaluate.price import STEP
from ...evaluate.scene import Scene
from ...options import Candidate, EvaluationOptions, Member, PlacementOptions, Redundancy, TimedMetric
from ...params import Params
from ...task import Task
from ..placement import PlacementStrategy, check_goal, check_groups, stated_placement
from ..strategy import Again, Solution
from . import EplbParams
from .sections import remarks, sections

# Options of a plan that are its own.
OWN = ("groups", "dead", "pins", "quantile", "raw", "redundancy", "swaps", "mixture")
TRIAL_LAYERS = 8
MOST_EXTRA = 4  # slots a device beyond the fewest
TIMES: tuple[TimedMetric, ...] = (STEP, EXPERTS)


class Eplb(PlacementStrategy):
    """Busy experts are replicated, and devices loaded evenly in every step."""

    name = "eplb"
    by_loads = True
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Balance, which is what it makes."""
        return BALANCE

    def variants(self) -> Sequence[Params]:
        """One slot an expert, and as many replicas as serve."""
        return EplbParams(), EplbParams(redundant="auto")

    def settled(self, params: Params, plan: Plan) -> Params:
        """The number of replicas that was chosen."""
        weighed = PlacementOptions.of(plan).redundancy
        return params if weighed is None else replace(EplbParams.of(params), redundant=weighed.chosen.redundant)

    def place(self, counts: Counts, task: Task, slots: Ints) -> PlacementResult:
        """Place by steps where recorded ones differ by more than chance, else by all loads together."""
        params, mixture, recorded = EplbParams.of(task.params), task.request.mixture, "step" in task.source.known
        if mixture and params.quantile is not None:
            raise UsageError("--quantile with several --trace, which are balanced together; leave it out")
        if params.quantile is not None and not recorded:
            raise UsageError(f"--quantile of steps, and {task.source.path} has none recorded; leave it out")
        several = recorded and params.method != "published" and not mixture
        by_step = several and _steps_decide(task.fitted_steps, task, slots)
        return _solved(task.fitted_steps if by_step else counts.loads, task, slots)

    def weighed(self, counts: Counts, task: Task) -> Redundancy:
        """Placements with up to 4 extra slots a device, side by side on the part that judges.

        UsageError where no token of that part is routed.
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
        if any(BALANCE not in figures.value for figures in judged):
            raise UsageError("--redundant auto: no step that judges routes a token; expected some: record more")
        each, alive, experts = task.model.expert_bytes, len(task.alive), task.model.num_experts
        candidates = tuple(
            Candidate(
                redundant=slots * alive - experts,
                slots=slots,
                balance=figures.value[BALANCE],
                balance_p95=figures.value[TAIL],
                seconds=figures.value[timed[0]] if timed else None,
                memory_bytes=None if each is None else slots * task.model.num_layers * each,
            )
            for slots, figures in enumerate(judged, fewest)
        )
        metric = timed[0] if timed else BALANCE
        return Redundancy(metric=metric, held_out=task.request.fit_fraction < 1, candidates=candidates)

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

    def recheck(self, plan: Plan, again: Again | None, certificate: Certificate) -> None:
        """Recheck that it keeps what it was asked to, its balance, and the arithmetic of its candidates."""
        placement, options = stated_placement(plan, self.name, OWN)
        _check_kept(plan, placement, options)
        if options.redundancy is not None:
            _check_redundancy(plan, placement, options.redundancy, options.dead, certificate)
        if options.raw or options.swaps:
            certificate.unchecked.append("EPLB unrepaired, and plans of a phase judged on another")
        if options.dead or options.pins or options.groups == "whole":
            certificate.checked("dead devices, pins and whole groups")
        if "placement" not in plan.outcome:
            return
        names: tuple[str, ...] = ("balance",)  # of all loads together
        if options.quantile is not None:
            names = (f"step_balance_p{100 * options.quantile:g}",)
        elif EvaluationOptions.of(plan).step == "recorded" and options.method == "refined" and not options.mixture:
            names = ("step_balance", "balance")
        check_goal(plan, names, "min", {"mean", "largest replica"})
        if again is None:
            return
        certificate.unchecked.append("slots that were repaired")
        fitted, outcome = count_fitted(again.task, followed=0, beside=False), plan.outcome["placement"]
        value = balance(fitted.loads.astype(np.float64), placement)
        if outcome.objective.name.startswith("step"):
            value = step_balance(fitted.steps.astype(np.float64), placement, options.quantile)
        certificate.agree("objective", outcome.objective.value, value)
        certificate.checked("objective")
        if outcome.bound_kind is not None:
            certificate.unchecked.append(f"bound ({outcome.bound_kind})")


def _solved(loads: Ints, task: Task, slots: Ints) -> PlacementResult:
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


def _steps_decide(loads_BLE: Ints, task: Task, slots: Ints) -> bool:
    """Whether to make steps even, not their sum: asked for by a quantile, or unlike by more than chance.

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


def _slots_of(slots: int, task: Task) -> Ints:
    """Slots of every device, as many on all that are alive, `[D]`."""
    return np.isin(np.arange(task.request.cluster.num_devices), task.alive) * np.int64(slots)


def _fewest(task: Task) -> int:
    """Slots a device, with which all experts, and all that are pinned where they are, find a place."""
    pins, num_experts = {*EplbParams.of(task.params).pins}, task.model.num_experts
    on_device = Counter(device for _, device in pins)
    replicas = num_experts - len({expert for expert, _ in pins}) + len(pins)
    return min(max(-(-replicas // len(task.alive)), *on_device.values(), 1), num_experts)


def _check_kept(plan: Plan, placement: Placement, options: PlacementOptions) -> None:
    """Refuse a placement that does not keep what its options say that it was asked to."""
    for rank in options.dead:
        if rank >= placement.num_devices or placement.slots[rank]:
            raise CertificationError(f"device {rank} is dead, and the plan puts experts there; expected no slot")
    if empty := [*{*np.flatnonzero(placement.slots == 0).tolist()} - {*options.dead}]:
        raise CertificationError(f"device {empty[0]} has no slot, and is not dead; expected experts there")
    for layer in range(placement.num_layers):
        for expert, device in options.pins:
            if device >= placement.num_devices or expert not in placement.held(layer, device):
                raise CertificationError(f"layer {layer}: expert {expert} is pinned to device {device}, and not there")
    if options.groups == "whole":
        check_groups(plan)


def _check_redundancy(
    plan: Plan, placement: Placement, redundancy: Redundancy, dead: tuple[int, ...], certificate: Certificate
) -> None:
    """Recheck that slots, and figures on the part that judges, are those of the chosen candidate."""
    widths = [width for rank, width in enumerate(placement.slots.tolist()) if rank not in dead]
    if {*widths} != {redundancy.chosen.slots}:
        raise CertificationError(
            f"{sorted({*widths})} slots a device; the redundancy that was weighed says {redundancy.chosen.slots}"
        )
    each = plan.model.expert_bytes
    for one in redundancy.candidates:
        held = None if each is None else one.slots * plan.model.num_layers * each
        certificate.agree("redundant experts", one.redundant, one.slots * len(widths) - plan.model.num_experts)
        certificate.agree("bytes of experts on a device", one.memory_bytes, held)
    if plan.evaluation is not None and plan.strategies[-1] == "eplb":  # else it was judged anew
        chosen, metrics = redundancy.chosen, plan.evaluation.judging.contenders[0].metrics
        certificate.agree("redundancy on held-out units", redundancy.held_out, plan.evaluation.held_out is not None)
        claimed: dict[str, float | None] = {BALANCE: chosen.balance, TAIL: chosen.balance_p95}
        if redundancy.metric != BALANCE or chosen.seconds is not None:
            claimed[redundancy.metric] = chosen.seconds
        for name, figure in claimed.items():
            certificate.agree(f"redundancy: {name}", figure, metrics[name].value if name in metrics else None)
    certificate.unchecked.append("what other numbers of redundant experts give")


STRATEGY = Eplb()
