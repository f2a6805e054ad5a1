"""Result of every placement solver."""

from dataclasses import dataclass

from .outcome import Outcome
from .placement import Placement

__all__ = ["PlacementResult"]


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """A placement and how it came about.

    Parameters
    ----------
    repaired
        Choices of the published algorithm that were changed because they put an expert twice on a device.
    """

    placement: Placement
    outcome: Outcome
    repaired: int = 0
