"""ExFlow: experts that follow each other live together (solvers/exflow)."""

import numpy as np
from numpy.typing import NDArray

from ..solvers import exflow
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .request import Request

__all__ = ["place"]


def place(counts: Counts, request: Request, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the top-1 transitions between consecutive MoE layers."""
    return exflow.solve(
        counts.transitions,
        request.cluster,
        loads=counts.loads,
        slots=slots,
        method="ilp" if request.method == "ilp" else "sweeps",
        backend=request.backend,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
    )
