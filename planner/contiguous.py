"""Contiguous: experts in their own order, what every engine does without a plan (solvers/contiguous)."""

import numpy as np
from numpy.typing import NDArray

from ..solvers import contiguous
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .task import Task

__all__ = ["place"]


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place expert i mod E in slot i of every layer."""
    num_layers, num_experts = counts.loads.shape
    return contiguous.solve(num_layers, num_experts, task.request.cluster, slots=slots)
