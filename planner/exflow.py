"""ExFlow: experts that follow each other live together (solvers/exflow)."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..solvers import exflow
from ..solvers.exflow.strategy import Method
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .task import Task

__all__ = ["place"]


def place(counts: Counts, task: Task, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the top-1 transitions between consecutive MoE layers."""
    request = task.request
    return exflow.solve(
        counts.transitions,
        request.cluster,
        loads=counts.loads,
        slots=slots,
        method=cast(Method, task.method),
        backend=request.backend,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
    )
