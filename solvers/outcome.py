"""The outcome of a solve: how it ended, what it reached and what bounds it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

__all__ = ["Objective", "Outcome", "Status", "relative_gap"]


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # proven: the bound meets the value
    FEASIBLE = "feasible"  # a heuristic's answer, run to its end
    TIME_LIMIT = "time_limit"  # the best found when time ran out
    INTERRUPTED = "interrupted"  # the best found at Ctrl-C


@dataclass(frozen=True, slots=True)
class Objective:
    """What was optimised, its value, and whether more ("max") or less ("min") is better."""

    name: str
    value: float
    sense: Literal["min", "max"]

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solve beside the decision itself.

    Parameters
    ----------
    bound
        No solution is better than this; None where nothing is proven ("no bound").
    bound_kind
        Which bound: "transportation", "spectral", "ilp", "exact"; None without a bound.
    wall_s
        Seconds the solve took.
    backend
        What solved it, e.g. "moeplan", "ortools cp-sat", "pulp cbc".
    """

    status: Status
    objective: Objective
    bound: float | None
    bound_kind: str | None
    gap: float | None
    wall_s: float
    backend: str

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def relative_gap(value: float, bound: float | None) -> float | None:
    """`|bound - value| / max(|bound|, |value|)`, 0 where both are 0, None without a bound."""
    if bound is None:
        return None
    scale = max(abs(bound), abs(value))
    return abs(bound - value) / scale if scale else 0.0
