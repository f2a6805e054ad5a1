"""Base of all placement strategies: count the fitted units, place, compare with coherence and EPLB, recheck.

The simplest one stands here: contiguous, what every engine does without a plan.

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...errors import CertificationError, InputError
from ...runtime.decisions import PlacementDecision
from ...runtime.plan import Plan
from ...solvers import contiguous, eplb
from ...solvers.arrays import Bools, Ints
from ...solvers.balance import balance, step_ratios
from ...solvers.outcome import PlacementResult
from ...solvers.placement import Placement
from ...traces.count_form import CountTrace
from ...traces.counts import Counts, Pairs, count
from ..evaluate.journey import Contender, Journey, contiguous_in
from ..evaluate.units import loads_of
from ..params import Params, PlacementParams
from ..task import Task
from .placement_options import PlacementOptions
from .strategy import Recheck, Solution, Strategy

if TYPE_CHECKING:
    from ..certify.certificate import Certificate

WHOLE = 2**40  # what the loads of a layer of a mixture add up to
ASKED = ("method", "backend", "time_limit_s", "groups", "dead", "pins", "quantile")  # that a plan keeps
UNASKED = {"method": None, "backend": "ortools", "time_limit_s": 30.0}


class PlacementStrategy(Strategy):
    """A strategy that places experts by counts of the fitted units."""

    decides = "placement"
    objectives: ClassVar = {"balance": ("busiest device over the mean, all fitted loads together,", ".4f")}

    def titled(self, params: Params) -> str:
        """The strategy by name, with its replicas."""
        asked = PlacementParams.of(params)
        replicas = f", {asked.redundant} replicas" if asked.redundant else ""
        return super().titled(replace(asked, redundant=0)) + replicas

    def counted_pairs(self, task: Task) -> tuple[Pairs, bool]:
        """Pairs of experts to count, and whether those inside layers are counted too."""
        return "top1", False

    def solution(self, placed: PlacementResult, task: Task, **options: Any) -> Solution:
        """The solution of a placement, with the options of its strategy."""
        asked = {name: getattr(task.params, name) for name in ASKED if hasattr(task.params, name)}
        kept = {"strategy": self.name, "dispatch_model": task.dispatch_model, **UNASKED, **asked, **options}
        decision = PlacementDecision.of(placed.placement, repaired=placed.repaired)
        return Solution(decision, PlacementOptions(**kept), placed.outcome)

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """Rivals that tell the gain of coherence from that of the placement, and published EPLB in as many slots."""
        slots_D, groups, rows = journey.placement.slots, task.model.num_expert_groups, list[Contender]()
        if journey.dispatch_model == "coherent":
            in_order = contiguous_in(slots_D, task.model, plan.cluster, journey.rule)
            rows = [in_order.named(in_order.name, dispatch_model="coherent")]
            rows.append(Contender("plan", replace(journey, dispatch_model="standard")))
        published = eplb.solve(task.counts.loads, plan.cluster, slots=slots_D, num_groups=groups, method="published")
        return [*rows, Contender("eplb", Journey("standard", published.placement))]

    def count(self, task: Task) -> Counts:
        """The counts of the fitted units; of several traces or one in count form the loads alone."""
        alone = self.by_loads and (task.request.mixture or isinstance(task.source, CountTrace))
        pairs = None if alone else self.counted_pairs(task)
        counts = task.once(
            ("counts", *task.fitted_by, pairs), lambda: _loads(task) if alone else self.counted(task, task.fitted)
        )
        if not counts.loads.any():
            raise InputError(
                f"{task.source.path}: no token of the fitted samples is routed; there is nothing to place by"
            )
        return counts

    def counted(self, task: Task, chosen: Bools | Ints) -> Counts:
        """The counts of chosen units, of what the task keeps together."""
        phases, (pairs, inside) = task.request.phases, self.counted_pairs(task)
        keep = partial(np.isin, test_elements=task.units.unit_ids[chosen])
        return count(task.trace, keep=keep, pairs=pairs, coactivation=inside, phases=phases or None)


class Contiguous(PlacementStrategy):
    """Expert i mod E in slot i of every layer."""

    name = "contiguous"
    dispatch_models = ("standard", "coherent")

    def variants(self, task: Task, engine: str | None = None) -> Sequence[Params]:
        """No variants: experts in order are today's placement."""
        return ()

    def solve(self, task: Task) -> Solution:
        """Place the experts in order, once there are counts to judge that by."""
        num_layers, num_experts = task.counts.loads.shape
        task.say(f"solving {self.name}")
        placed = contiguous.solve(num_layers, num_experts, task.request.cluster, slots=task.slots)
        return self.solution(placed, task)

    def recheck(self, plan: Plan, again: Recheck | None, certificate: "Certificate") -> None:
        """Recheck that the objective is the balance of equal loads."""
        placement, _ = stated_placement(plan, self.name, ())
        if "placement" not in plan.outcome:
            return
        check_goal(plan, ("balance",), "min", frozenset())
        if again is not None:
            equal_LE = np.ones((plan.model.num_layers, plan.model.num_experts))
            certificate.agree("objective", plan.outcome["placement"].objective.value, balance(equal_LE, placement))
            certificate.checked("objective")


def _loads(task: Task) -> Counts:
    """The loads of the fitted units, of several traces together."""
    parts = [
        (weight, loads_of(one.source, one.units.unit_ids[one.fitted], phases=one.request.phases or None))
        for weight, one in task.members
    ]
    loads_LE = mixed_loads(parts) if task.request.mixture else parts[0][1]
    tokens = sum(int(one.units.unit_tokens[one.fitted].sum()) for _, one in task.members)
    nothing = np.zeros((0, task.model.num_experts, task.model.num_experts), np.int64)
    return Counts(loads_LE, nothing, None, tokens)


def highest(loads_LE: Ints, placement: Placement) -> float:
    """The most load of a device in any layer, over the mean, replicas sharing alike."""
    return float(step_ratios(loads_LE[None].astype(np.float64), placement).max())


def mixed_loads(parts: Iterable[tuple[float, Ints]]) -> Ints:
    """The loads of several traces `[L, E]`: a layer of each adds up to its weight in `WHOLE`."""
    mixed_LE: Ints = sum(
        np.rint(weight * WHOLE * loads_LE / np.maximum(loads_LE.sum(axis=1, keepdims=True), 1)).astype(np.int64)
        for weight, loads_LE in parts
    )
    return mixed_LE


def stated_placement(plan: Plan, name: str, own: tuple[str, ...]) -> tuple[Placement, PlacementOptions]:
    """A plan's placement and its options, refused where they hold any that its strategy does not take."""
    options, placement = PlacementOptions.of(plan), plan.placement
    assert placement is not None
    kept = {"strategy", "dispatch_model", "method", "backend", "time_limit_s", *own}
    asked = {key for key in options.model_fields_set if getattr(options, key) not in (None, (), "split")} - kept
    if options.strategy != name or asked:
        raise CertificationError(
            f"strategies {[*plan.strategies]}, but options.placement is of {options.strategy!r} with"
            f" {', '.join(sorted(asked)) or 'no flags'} that {name} does not have; the plan was edited"
        )
    return placement, options


def check_goal(plan: Plan, names: tuple[str, ...], sense: str, kinds: Set[str]) -> None:
    """Refuse another objective than a strategy has, and a bound of kinds that it does not have."""
    outcome = plan.outcome["placement"]
    goal, kind = outcome.objective, outcome.bound_kind
    if goal.name not in names or goal.sense != sense:
        raise CertificationError(f"objective {goal.sense} {goal.name}; expected {sense} {' or '.join(names)}")
    if kind is not None and not {*kind.split(" and ")} <= kinds:
        raise CertificationError(f"bound of {kind}; expected of {', '.join(sorted(kinds))}")


def check_groups(plan: Plan) -> None:
    """Refuse a placement that splits a group: each is in one block of slots of its own."""
    decision, groups = plan.decisions.placement, plan.model.num_expert_groups
    assert decision is not None
    if not groups or plan.model.num_experts % groups:
        raise CertificationError("whole expert groups of a model without such groups")
    size = plan.model.num_experts // groups
    for layer, row in enumerate(decision.physical_to_logical):
        blocks = [{expert // size for expert in row[first : first + size]} for first in range(0, len(row), size)]
        if len(row) != plan.model.num_experts or max(map(len, blocks)) > 1:
            raise CertificationError(f"layer {layer}: an expert group is split; expected one in every {size} slots")


STRATEGY = Contiguous()
