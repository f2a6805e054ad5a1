"""Contiguous: experts in their own order, what every engine does without a plan."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from ...solvers import contiguous
from ...solvers.outcome import PlacementResult
from ...traces.counts import Counts
from ..task import Task
from .placement import PlacementStrategy
from .strategy import Again, Check, Told

__all__ = ["STRATEGY"]


class Contiguous(PlacementStrategy):
    """Expert i mod E in slot i of every layer."""

    name = "contiguous"
    dispatch_models = ("standard", "coherent")

    def place(self, counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
        """Place the experts in order."""
        num_layers, num_experts = counts.loads.shape
        return contiguous.solve(num_layers, num_experts, task.request.cluster, slots=slots)

    def recheck(self, plan: Plan, again: Again | None) -> Iterator[Check | Told]:
        """The balance of equal loads."""
        from .recheck import rechecked_balance

        return rechecked_balance(plan, again, self.name)


STRATEGY = Contiguous()
