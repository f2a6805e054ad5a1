"""EPLB: replicas for the busiest experts, packed evenly, by steps where these differ (solvers/eplb).

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ....errors import CertificationError, UsageError
from ....runtime.decisions import DispatchModel
from ....runtime.exports import ENGINES, family_of
from ....runtime.plan import Plan
from ....solvers.arrays import Ints
from ....solvers.balance import balance, splits_steps, step_balance
from ....solvers.outcome import ROUNDING
from ....solvers.placement import Placement
from ....traces.count_form import CountTrace
from ...certify.certificate import Certificate
from ...certify.recounted import count_fitted
from ...evaluate.evaluate import evaluate
from ...evaluate.journey import EVENLY, Contender, Journey
from ...evaluate.metrics import BALANCE, EXPERTS, TAIL, TimedMetric, load_metric
from ...evaluate.price import STEP
from ...evaluate.scene import Scene
from ...options import EvaluationOptions
from ...params import Params
from ...task import Task
from ..placement import PlacementStrategy, check_goal, check_groups, stated_placement
from ..placement_options import PlacementOptions
from ..strategy import Recheck, Solution
from . import EplbParams
from .choice import BY_STEPS, choose, left_out, loads_by, solved, tried_by
from .options import By, Candidate, Choice, Member, Redundancy
from .sections import pictures, remarks, sections

# Options of a plan that are its own.
OWN = ("groups", "dead", "pins", "quantile", "choice", "redundancy", "mixture")
MOST_EXTRA = 4  # slots per device beyond the fewest
TIMES: tuple[TimedMetric, ...] = (STEP, EXPERTS)
Way = tuple[By, Choice | None]  # how a task is placed, and the choice where it was one


class Eplb(PlacementStrategy):
    """Busy experts are replicated, and devices loaded evenly in every step."""

    name = "eplb"
    by_loads = True
    objectives: ClassVar = {
        **PlacementStrategy.objectives,
        "step_balance": ("busiest device over the mean, mean over the fitted steps,", ".4f"),
        "step_balance_p": ("busiest device over the mean, {} % of the fitted steps within,", ".4f"),
    }
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)
    pictures = staticmethod(pictures)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """The seconds of the busiest device's experts; where nothing times them balance, the objective of EPLB."""
        return load_metric(scene.costs)

    def variants(self, task: Task, engine: str | None = None) -> Sequence[Params]:
        """Parameters to try: each number of replicas, under every replica rule that cluster and engine allow."""
        even, near, exact = (EplbParams(replica_rule=rule) for rule in ("even", "nearest", "lp"))
        splits = engine is not None and family_of(ENGINES[engine].splits, task.model, None)
        fits = _fewest(task, near) <= _fewest(task, even) + MOST_EXTRA and not isinstance(task.source, CountTrace)
        several = task.request.cluster.num_nodes > 1
        rules = [even, *([near] if fits and several else []), *([exact] if splits else [])]
        numbers = [
            replace(params, redundant=extra)
            for params in rules
            for slots in _widths(task, params)
            if (extra := slots * len(task.alive) - task.model.num_experts)
        ]
        return even, *numbers

    def titled(self, params: Params) -> str:
        """The strategy by name, with its replicas: "32 nearest" where every node holds every expert."""
        asked = EplbParams.of(params)
        if asked.replica_rule == "even":
            return super().titled(asked)
        replicas = f", {asked.redundant}" if asked.redundant else ""
        return f"{super().titled(replace(asked, replica_rule='even', redundant=0))}{replicas} {asked.replica_rule}"

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """Rivals of any placement; where steps are split exactly, published EPLB so, too, and the plan split evenly."""
        rows = super().rivals(task, plan, journey)
        if not splits_steps(journey.placement):
            return rows
        rule = journey.placement.replica_rule
        exactly = [one.named(f"{one.name}, {rule}", replica_rule=rule.value) for one in rows if one.name == "eplb"]
        return [*rows, *exactly, Contender(EVENLY, replace(journey, replica_rule="even"))]

    def weighed(self, task: Task) -> tuple[Redundancy, Way]:
        """Placements with up to 4 slots per device beyond the fewest, judged on a part of the fitted units.

        The other parts place them; where one unit was fitted, it does both. With the way of the chosen number.
        UsageError where no token of the part that judges is routed.
        """
        params = EplbParams.of(task.params)
        widths, contenders, ways = _widths(task, params), list[Contender](), dict[int, Way]()
        for slots in widths:
            task.say(f"weighing {slots} slots per device, of {widths[0]} to {widths[-1]}")
            slots_D = _slots_of(slots, task)
            ways[slots] = by, _ = _way(task, slots_D)
            placement = solved(by, loads_by(by, left_out(task, 0)[0]), task, slots_D).placement
            contenders.append(Contender(str(slots), Journey(task.dispatch_model, placement, wire=task.wire)))
        scenes = [(weight, replace(one.in_parts, cohorts=one.in_parts.cohorts[:1])) for weight, one in task.members]
        judged = list(evaluate(scenes, contenders).judged.values())
        timed = [name for name in TIMES if all(name in figures.value for figures in judged)]
        if any(BALANCE not in figures.value for figures in judged):
            raise UsageError("--redundant auto: no step that judges routes a token; expected some: record more")
        each, alive, experts = task.model.expert_bytes, len(task.alive), task.model.num_experts
        shared = int(task.request.waterfill)  # experts on every device that are load, too
        candidates = tuple(
            Candidate(
                redundant=slots * alive - experts,
                slots=slots,
                balance=figures.value[BALANCE],
                balance_p95=figures.value[TAIL],
                seconds=figures.value[timed[0]] if timed else None,
                memory_bytes=None if each is None else (slots + shared) * task.model.num_layers * each,
            )
            for slots, figures in zip(widths, judged, strict=True)
        )
        metric = timed[0] if timed else BALANCE
        apart = all(len(one.in_parts.cohorts) > 1 for _, one in task.members)
        weighed = Redundancy(metric=metric, held_out=apart, candidates=candidates)
        return weighed, ways[weighed.chosen.slots]

    def solve(self, task: Task) -> Solution:
        """Place the fitted units' experts, with the replicas asked for, or the number that serves best."""
        counts, redundancy = task.counts, None
        params = EplbParams.of(task.params)
        if params.redundant == "auto":
            redundancy, (by, choice) = self.weighed(task)
            slots_D = _slots_of(redundancy.chosen.slots, task)
        else:
            given = params.slots is not None or params.redundant or params.replica_rule == "even"
            slots_D = task.slots if given else _slots_of(_fewest(task, params), task)
            by, choice = _way(task, slots_D)
        task.say(f"solving {self.name}")
        mixture = tuple(
            Member(path=str(member.source.path), sha256=member.source.sha256, weight=weight)
            for weight, member in (task.members if task.request.mixture else ())
        )
        placed = solved(by, task.steps[0] if by in BY_STEPS else counts.loads, task, slots_D)
        return self.solution(placed, task, choice=choice, redundancy=redundancy, mixture=mixture)

    def recheck(self, plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
        """Recheck that it keeps what it was asked to, its balance, and the arithmetic of its candidates."""
        placement, options = stated_placement(plan, self.name, OWN)
        _check_kept(plan, placement, options)
        by = _check_choice(options, certificate)
        if options.redundancy is not None:
            _check_redundancy(plan, placement, options.redundancy, options.dead, certificate)
        if options.dead or options.pins or options.groups == "whole":
            certificate.checked("dead devices, pins and whole groups")
        if "placement" not in plan.outcome:
            return
        check_goal(plan, _objectives(plan, options, by), "min", {"mean", "largest replica"})
        if again is None:
            return
        certificate.unchecked.append("slots that were repaired")
        fitted, outcome = count_fitted(again.task, followed=0, beside=False), plan.outcome["placement"]
        if options.choice is not None and by == "published":
            expected = solved("published", fitted.loads, again.task, placement.slots).placement
            if not np.array_equal(expected.physical_to_logical, placement.physical_to_logical):
                raise CertificationError("EPLB as published was chosen, and the placement is another: re-run solve")
        value = balance(fitted.loads.astype(np.float64), placement)
        if outcome.objective.name.startswith("step"):
            value = step_balance(fitted.steps.astype(np.float64), placement, options.quantile)
        certificate.agree("objective", outcome.objective.value, value)
        certificate.checked("objective")
        if outcome.bound_kind is not None:
            certificate.unchecked.append(f"bound ({outcome.bound_kind})")


def _way(task: Task, slots: Ints) -> Way:
    """Way to place: as asked for, by steps where a quantile of these is, or chosen on parts of the fitted units."""
    params, mixture, recorded = EplbParams.of(task.params), task.request.mixture, "step" in task.source.known
    if mixture and params.quantile is not None:
        raise UsageError("--quantile with several --trace, which are balanced together; leave it out")
    if params.quantile is not None and not recorded:
        raise UsageError(f"--quantile of steps, and {task.source.path} has none recorded; leave it out")
    if params.method == "auto" and params.quantile is None:
        choice = choose(task, slots)
        return choice.chosen, choice
    if params.method == "published":
        return "published", None
    return ("steps" if recorded and not mixture else "sum"), None


def _slots_of(slots: int, task: Task) -> Ints:
    """Slots of every device, `[D]`: equal on all devices that are alive."""
    return np.isin(np.arange(task.request.cluster.num_devices), task.alive) * np.int64(slots)


def _widths(task: Task, params: EplbParams) -> range:
    """Numbers of slots per device that are tried: the fewest, and up to 4 more than without a replica rule."""
    fewest, usual = _fewest(task, params), _fewest(task, replace(params, replica_rule="even"))
    return range(fewest, max(fewest, min(usual + MOST_EXTRA, task.model.num_experts)) + 1)


def _fewest(task: Task, params: EplbParams) -> int:
    """Fewest slots per device that give every expert (nearest: on every node) and every pin a place."""
    num_experts, pins = task.model.num_experts, {*params.pins}
    if params.replica_rule == "nearest":
        return -(-num_experts // task.request.cluster.devices_per_node)
    on_device = Counter(device for _, device in pins)
    replicas = num_experts - len({expert for expert, _ in pins}) + len(pins)
    return min(max(-(-replicas // len(task.alive)), *on_device.values(), 1), num_experts)


def _check_kept(plan: Plan, placement: Placement, options: PlacementOptions) -> None:
    """Refuse a placement that breaks the groups, pins or dead devices of its options."""
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


def _check_choice(options: PlacementOptions, certificate: Certificate) -> By | None:
    """Refuse a choice that is not one between all candidates, or is where none was to be made; what was chosen."""
    choice, chooses = options.choice, options.method == "auto" and options.quantile is None
    if (choice is not None) != chooses:
        raise CertificationError(f"method {options.method} {'without' if chooses else 'with'} a choice: re-run solve")
    if choice is None:
        return None
    names = tuple(one.by for one in choice.candidates)
    if names not in ((), tried_by(mixed=bool(options.mixture))) or (not names) != bool(choice.reason):
        raise CertificationError(f"a choice between {', '.join(names) or 'nothing'}: re-run solve")
    for one in choice.candidates:
        if one.low > one.published - one.balance + ROUNDING:
            raise CertificationError(
                f"{one.by} gains {one.published - one.balance:.4g}, at least {one.low:.4g} for certain: above it"
            )
    certificate.checked("choice by the figures of candidates")
    certificate.unchecked.append("figures of candidates on parts of the fitted samples")
    return choice.chosen


def _objectives(plan: Plan, options: PlacementOptions, by: By | None) -> tuple[str, ...]:
    """Objectives that a plan may have."""
    if options.quantile is not None:
        return (f"step_balance_p{100 * options.quantile:g}",)
    if by is not None:
        return ("step_balance",) if by in BY_STEPS else ("balance",)
    recorded = EvaluationOptions.of(plan).step == "recorded"
    if recorded and options.method == "refined" and not options.mixture:
        return ("step_balance", "balance")
    return ("balance",)


def _check_redundancy(
    plan: Plan, placement: Placement, redundancy: Redundancy, dead: tuple[int, ...], certificate: Certificate
) -> None:
    """Recheck that slots are those of the chosen candidate, and the arithmetic of all."""
    widths = [width for rank, width in enumerate(placement.slots.tolist()) if rank not in dead]
    if {*widths} != {redundancy.chosen.slots}:
        raise CertificationError(
            f"{sorted({*widths})} slots per device; the redundancy that was weighed says {redundancy.chosen.slots}"
        )
    each = plan.model.expert_bytes
    for one in redundancy.candidates:
        held = None if each is None else (one.slots + plan.fills) * plan.model.num_layers * each
        certificate.agree("redundant experts", one.redundant, one.slots * len(widths) - plan.model.num_experts)
        certificate.agree("bytes of experts on a device", one.memory_bytes, held)
    certificate.unchecked.append("what numbers of redundant experts give on a part of the fitted samples")


STRATEGY = Eplb()
