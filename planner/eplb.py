"""EPLB: replicas for the busiest experts, packed evenly (solvers/eplb)."""

import numpy as np
from numpy.typing import NDArray

from ..solvers import eplb
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from .request import Request

__all__ = ["place"]


def place(counts: Counts, request: Request, slots: NDArray[np.int64]) -> PlacementResult:
    """Place by the loads of every layer."""
    return eplb.solve(counts.loads, request.cluster, slots=slots)
