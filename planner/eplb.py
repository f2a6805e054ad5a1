"""EPLB: replicas for the busiest experts, packed evenly (solvers/eplb)."""

import numpy as np
from numpy.typing import NDArray

from ..solvers import eplb
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .task import Task

__all__ = ["place"]


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the loads of every layer, expert groups on nodes where the model has them."""
    groups = task.trace.model.num_expert_groups
    return eplb.solve(counts.loads, task.request.cluster, slots=slots, num_groups=groups)
