"""Record of how the placement was decided, by whichever strategy places experts."""

from typing import Literal

from pydantic import Field

from ...runtime.decisions import DispatchModel
from ..options import Options, Ordinal
from .eplb.options import Choice, Member, Redundancy
from .exflow.options import Replanned, Search


class PlacementOptions(Options):
    """Record of how the placement was decided."""

    key = "placement"

    strategy: str
    dispatch_model: DispatchModel
    method: str | None
    backend: str
    time_limit_s: float
    #: search, replanned: by exflow, and where it replaces another
    search: Search | None = None
    replanned: Replanned | None = None
    #: groups, dead, pins, quantile: as asked for; see `planner.request`
    groups: Literal["split", "whole"] = "split"
    dead: tuple[Ordinal, ...] = ()
    pins: tuple[tuple[Ordinal, Ordinal], ...] = ()
    quantile: float | None = Field(None, gt=0, le=1)
    #: choice, redundancy, mixture: of eplb; figures of a mixture are weighted means over its traces
    choice: Choice | None = None
    redundancy: Redundancy | None = None
    mixture: tuple[Member, ...] = ()
