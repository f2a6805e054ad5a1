"""A placement with the record of the search that found it, as a plan keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..solvers.result import PlacementResult
from .options import Search

__all__ = ["Searched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched(PlacementResult):
    """What a strategy that searches gives back; the others give a plain result.

    `sidecars` are name to contents of what `search` names.
    """

    search: Search
    sidecars: Mapping[str, bytes] = field(default_factory=dict)
