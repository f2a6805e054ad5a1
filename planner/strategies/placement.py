"""Base of all placement strategies: count the fitted units, place, compare with coherence and EPLB."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...runtime.decisions import PlacementDecision
from ...runtime.plan import Plan
from ...solvers import eplb
from ...solvers.outcome import PlacementResult
from ...traces.count_form import CountTrace
from ...traces.counts import Counts, Pairs, count
from ..evaluate.journey import Contender, Journey, contiguous_in, today
from ..evaluate.loads import loads_of
from ..options import PlacementOptions
from ..task import Task
from .strategy import Solution, Strategy

__all__ = ["PlacementStrategy", "published"]

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
        """Which pairs of experts are counted, and whether those inside layers too."""
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
            in_order = contiguous_in(slots_D, task.model, plan.cluster) or today(task.model, plan.cluster, slots_D)
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
