"""Record of what auto tried, and what it gained."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from ....runtime.decisions import DispatchModel, Record
from ....runtime.plan import Metric
from ....solvers.outcome import Status
from ...evaluate.metrics import Currency
from ...options import Options

Ended = Literal[Status.FEASIBLE, Status.TIME_LIMIT, Status.INTERRUPTED]


class Tried(Record):
    """A candidate of auto with its figures where plans are judged; the chosen one as solved anew."""

    parts: tuple[str, ...] = Field(min_length=1)  #: Its parts by name, in the order they were decided
    decisions: tuple[str, ...]  #: What it decides
    dispatch_model: DispatchModel
    #: inner, has_interval: lower end of its gain over today, a share, on the fitted units that did not decide it, and
    #: whether there is one; else the gain
    inner: float
    has_interval: bool
    gain: float  #: The gain itself there
    listed: bool  #: Whether the table shows it: the best of those that differ in replicas alone
    share: Metric  #: The same on the part that judges
    engines: tuple[str, ...]  #: Engines whose files carry all of it
    #: metrics, today: its figures there, and today's beside it
    metrics: Mapping[str, float]
    today: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name on a screen."""
        return " + ".join(self.parts)


class AutoOptions(Options):
    """Record of what auto tried, the chosen candidate first, in its figures as solved anew."""

    key = "auto"

    engine: str | None  #: What must be able to carry it out, where asked for
    metric: Currency  #: What candidates are compared by
    tried: tuple[Tried, ...] = Field(min_length=1)
    refused: Mapping[str, str]  #: Why parts could not be tried, by name
    status: Ended = Status.FEASIBLE  #: Whether all was tried, or the best was kept at the time limit or at Ctrl-C

    @model_validator(mode="after")
    def _compared(self) -> Self:
        if any(
            self.metric not in figures for candidate in self.tried for figures in (candidate.metrics, candidate.today)
        ):
            raise ValueError(f"a candidate lacks {self.metric}, by which all are compared")
        return self

    @property
    def listed(self) -> list[Tried]:
        """The candidates that the table shows beside the chosen one."""
        return [candidate for candidate in self.tried[1:] if candidate.listed]
