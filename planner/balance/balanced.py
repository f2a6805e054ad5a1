"""A placement by loads with what it is held against, as a plan keeps it."""

from dataclasses import dataclass

from ...solvers.result import PlacementResult
from ..balance_options import RawBalance

__all__ = ["Balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced(PlacementResult):
    """What eplb gives back; the others give a plain result."""

    raw: RawBalance
