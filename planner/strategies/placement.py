"""Base of all placement strategies: count the fitted units, place, compare with coherence and EPLB, recheck.

The simplest one stands here: contiguous, what every engine does without a plan.

Legend: B steps; L MoE layers; E experts; D devices.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence, Set
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, InputError
from ...runtime.decisions import PlacementDecision
from ...runtime.plan import Plan
from ...solvers import contiguous, eplb
from ...solvers.outcome import PlacementResult
from ...traces.count_form import CountTrace
from ...traces.counts import Counts, Pairs, count
from ..evaluate.journey import Contender, Journey, contiguous_in
from ..evaluate.splits import loads_of
from ..options import PlacementOptions
from ..task import Task
from .strategy import Again, Check, Solution, Strategy, Told

__all__ = ["STRATEGY", "PlacementStrategy", "balances", "check_goal", "check_groups", "placement_options", "published"]

Loads = NDArray[Any]

WHOLE = 2**40
ASKED = ("method", "backend", "time_limit_s", "groups", "dead", "pins", "quantile")  # that a plan keeps
UNASKED = {"method": None, "backend": "ortools", "time_limit_s": 30.0}


class PlacementStrategy(Strategy):
    """A strategy that places experts by counts of the fitted units.

    Attributes
    ----------
    by_loads
        Whether the loads of experts are enough.
    """

    decides = "placement"
    by_loads: ClassVar[bool] = False

    @abstractmethod
    def place(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place the experts of every layer in `slots` (`[D]`) slots of each device."""

    def counted_pairs(self, task: Task) -> tuple[Pairs, bool]:
        """Pairs of experts to count, and whether those inside layers are counted too."""
        return "top1", False

    def solve(self, task: Task) -> Solution:
        """Place by the fitted units."""
        counts = task.counts
        task.say(f"solving {self.name}")
        return self.solution(self.place(counts, task, task.slots), task)

    def solution(self, placed: PlacementResult, task: Task, **options: Any) -> Solution:
        """The solution of a placement, with the options of its strategy."""
        asked = {name: getattr(task.params, name) for name in ASKED if hasattr(task.params, name)}
        return Solution(
            decision=PlacementDecision.of(placed.placement, repaired=placed.repaired),
            options=PlacementOptions(
                strategy=self.name, dispatch_model=task.dispatch_model, **{**UNASKED, **asked, **options}
            ),
            outcome=placed.outcome,
        )

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """Coherence and placement told apart, and EPLB as published in as many slots."""
        rows = []
        if journey.dispatch_model == "coherent":
            slots_D = journey.placement.slots
            in_order = contiguous_in(slots_D, task.model, plan.cluster)
            rows = [in_order.named(in_order.name, dispatch_model="coherent")]
            rows.append(Contender("plan", journey).named("plan", dispatch_model="standard"))
        placement = published(task.counts, task, journey.placement.slots).placement
        return [*rows, Contender("eplb", Journey("standard", placement))]

    def count(self, task: Task) -> Counts:
        """The counts of the fitted units; of several traces or one in count form the loads alone."""
        if self.by_loads and (task.request.mixture or isinstance(task.source, CountTrace)):
            counts = _loads(task)
        else:
            counts = self.counted(task, task.fitted)
        if not counts.loads.any():
            raise InputError(
                f"{task.source.path}: no token of the fitted samples is routed; there is nothing to place by"
            )
        return counts

    def counted(self, task: Task, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Counts:
        """The counts of chosen units, of what the task keeps together."""
        unit_ids = task.units.unit_ids[chosen]
        pairs, coactivation = self.counted_pairs(task)
        return count(
            task.trace,
            keep=lambda units: np.isin(units, unit_ids),
            pairs=pairs,
            coactivation=coactivation,
            phases=task.request.phases or None,
        )


class Contiguous(PlacementStrategy):
    """Expert i mod E in slot i of every layer."""

    name = "contiguous"
    dispatch_models = ("standard", "coherent")

    def place(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place the experts in order."""
        num_layers, num_experts = counts.loads.shape
        return contiguous.solve(num_layers, num_experts, task.request.cluster, slots=slots)

    def recheck(self, plan: Plan, again: Again | None) -> Iterator[Check | Told]:
        """Recheck that the objective is the balance of equal loads."""
        placement_options(plan, self.name, ())
        if "placement" not in plan.outcome:
            return
        check_goal(plan, ("balance",), "min", frozenset())
        if again is not None:
            equal = np.ones((1, plan.model.num_layers, plan.model.num_experts))
            yield Check("objective", plan.outcome["placement"].objective.value, float(balances(plan, equal).mean()))
            yield Told("objective", checked=True)


def published(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """The placement of DeepSeek's EPLB by the loads of every layer, expert groups on nodes where the model has them."""
    groups = task.model.num_expert_groups
    return eplb.solve(counts.loads, task.request.cluster, slots=slots, num_groups=groups, method="published")


def _loads(task: Task) -> Counts:
    """The loads of the fitted units; of several traces a layer of each adds up to its weight in `WHOLE`."""
    model, tokens, several = task.model, 0, bool(task.request.mixture)
    loads_LE = np.zeros((model.num_layers, model.num_experts), np.int64)
    for weight, one in task.members:
        fitted_LE = loads_of(one.source, one.units.unit_ids[one.fitted], phases=one.request.phases or None)
        total_L1 = np.maximum(fitted_LE.sum(axis=1, keepdims=True), 1)
        loads_LE += np.rint(weight * WHOLE * fitted_LE / total_L1).astype(np.int64) if several else fitted_LE
        tokens += int(one.units.unit_tokens[one.fitted].sum())
    nothing = np.zeros((0, model.num_experts, model.num_experts), np.int64)
    return Counts(loads_LE, nothing, None, tokens)


def placement_options(plan: Plan, name: str, own: tuple[str, ...]) -> PlacementOptions:
    """Options of a plan's placement, refused where they hold any that its strategy does not take."""
    options = PlacementOptions.of(plan)
    kept = {"strategy", "dispatch_model", "method", "backend", "time_limit_s", *own}
    asked = {key for key in options.model_fields_set if getattr(options, key) not in (None, (), "split")} - kept
    if options.strategy != name or asked:
        raise CertificationError(
            f"strategies {[*plan.strategies]} with options of {options.strategy!r}, {sorted(asked)} among them, flags"
            f" that {name} does not have"
        )
    return options


def check_goal(plan: Plan, names: tuple[str, ...], sense: str, kinds: Set[str]) -> None:
    """Refuse another objective than a strategy has, and a bound of kinds that it does not have."""
    outcome = plan.outcome["placement"]
    goal, kind = outcome.objective, outcome.bound_kind
    if goal.name not in names or goal.sense != sense:
        raise CertificationError(f"objective {goal.sense} {goal.name}; expected {sense} {' or '.join(names)}")
    if kind is not None and not {*kind.split(" and ")} <= kinds:
        raise CertificationError(f"bound of {kind}; expected of {', '.join(sorted(kinds))}")


def balances(plan: Plan, loads_BLE: Loads, rows: Loads | None = None) -> NDArray[np.float64]:
    """The busiest device over the mean of those with slots, by step and layer `[B, L]`, replicas sharing alike; 1 of
    nothing. `rows` are the expert in each slot, the plan's without.
    """
    placement = plan.placement
    assert placement is not None
    held = placement.physical_to_logical if rows is None else rows
    balance_BL = np.ones(loads_BLE.shape[:2])
    for layer, expert_P in enumerate(held):
        share_P = 1 / np.bincount(expert_P, minlength=placement.num_experts)[expert_P]
        load_BP = loads_BLE[:, layer, expert_P] * share_P
        ends = np.cumsum(placement.slots)
        load_BD = np.stack([one.sum(axis=1) for one in np.split(load_BP, ends[:-1], axis=1)], axis=1)
        load_BD = load_BD[:, placement.slots > 0]
        routed = load_BD.any(axis=1)
        balance_BL[routed, layer] = load_BD[routed].max(axis=1) / load_BD[routed].mean(axis=1)
    return balance_BL


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
