"""What a placement strategy is, and which there are.

To add one: a module here with a `place` call, and a row in `STRATEGIES`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..runtime.plan import DispatchModel
from ..solvers.result import PlacementResult
from ..traces.counts import Counts
from . import contiguous, eplb, exflow
from .request import Request

__all__ = ["STRATEGIES", "Place", "Strategy", "strategy"]


class Place(Protocol):
    """From the counts of the fitted samples to a placement."""

    def __call__(self, counts: Counts, request: Request, slots: NDArray[np.int64]) -> PlacementResult:
        """Place the experts of every layer in `slots` (`[D]`) slots of each device."""
        ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a strategy is run by default and judged.

    Parameters
    ----------
    dispatch_models
        Those it makes sense under, the default first.
    metric
        What its verdict is about; less is better.
    """

    name: str
    place: Place
    dispatch_models: tuple[DispatchModel, ...]
    metric: str


STRATEGIES = {
    row.name: row
    for row in (
        Strategy("exflow", exflow.place, ("coherent", "standard"), "device_copies"),
        Strategy("eplb", eplb.place, ("standard",), "balance"),
        Strategy("contiguous", contiguous.place, ("standard", "coherent"), "device_copies"),
    )
}


def strategy(name: str) -> Strategy:
    """The strategy of that name."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise UsageError(f"--strategy {name}; expected one of {', '.join(STRATEGIES)}") from None
