"""The outcome of a solve: how it ended, what it reached and what bounds it; with the placement, its result."""

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .placement import Placement

ROUNDING = 1e-9  # a value this close to its bound, relatively, meets it


class Status(StrEnum):
    """End of a solve."""

    OPTIMAL = "optimal"  # proven: the bound meets the value
    FEASIBLE = "feasible"  # a heuristic's answer, run to its end
    TIME_LIMIT = "time_limit"  # the best found when time ran out
    INTERRUPTED = "interrupted"  # the best found at Ctrl-C


@dataclass(frozen=True, slots=True)
class Objective:
    """Quantity that was optimised, its value, and whether more ("max") or less ("min") is better."""

    name: str
    value: float
    sense: Literal["min", "max"]

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solve beside the decision itself."""

    status: Status
    objective: Objective
    bound: float | None  #: No solution is better than this; None where nothing is proven ("no bound")
    #: Which bound: "transportation", "spectral", "ilp" and others, or several; None without a bound
    bound_kind: str | None
    gap: float | None
    wall_s: Annotated[float, Field(ge=0)]  #: Seconds the solve took
    backend: str  #: What solved it, e.g. "moeplan", "ortools cp-sat", "pulp cbc".
    #: Seconds before that, of compilation or of loading what was compiled
    compiled_s: Annotated[float, Field(ge=0)] = 0.0

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    @classmethod
    def of(
        cls,
        *,
        objective: Objective,
        started: float,
        status: Status = Status.FEASIBLE,
        bound: float | None = None,
        bound_kind: str | None = None,
        proven: bool = False,
        backend: str = "moeplan",
    ) -> "Outcome":
        """The outcome of a solve that ends now.

        Parameters
        ----------
        proven
            The value meets its bound up to rounding: it is optimal, and the bound.
        started
            `time.perf_counter()` at the start.
        """
        if proven:
            status, bound = Status.OPTIMAL, objective.value
        return cls(
            status=status,
            objective=objective,
            bound=bound,
            bound_kind=bound_kind,
            gap=relative_gap(objective.value, bound),
            wall_s=time.perf_counter() - started,
            backend=backend,
        )


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """A placement and how it came about."""

    placement: Placement
    outcome: Outcome
    #: Choices of the published algorithm that were changed because they put an expert twice on a device
    repaired: int = 0


def relative_gap(value: float, bound: float | None) -> float | None:
    """`|bound - value| / max(|bound|, |value|)`, 0 where both are 0, None without a bound."""
    if bound is None:
        return None
    scale = max(abs(bound), abs(value))
    return abs(bound - value) / scale if scale else 0.0
