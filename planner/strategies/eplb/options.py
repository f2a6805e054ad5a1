"""Record of how eplb chose among placements and numbers of redundant experts, and of the traces that it mixed."""

from typing import Literal

from pydantic import Field

from ....runtime.decisions import Record, Sha256
from ...evaluate.metrics import BALANCE, Currency
from ...options import Reason

Refined = Literal["sum", "steps", "robust"]
By = Literal["published"] | Refined  # what a placement of eplb is made by
NEAR = 1.02  # of the best: as good


class Trial(Record):
    """A placement by all but one of a few parts of the fitted units, judged on that one, beside EPLB as published.

    Each part in turn; means over layers (of all or some) and steps.
    """

    by: Refined  #: What is refined: loads together, steps, or resampled steps beside them
    #: balance, published: its own balance, and that of EPLB as published in the same layers
    balance: float = Field(ge=1 - 1e-9)
    published: float = Field(ge=1 - 1e-9)
    #: Lower end of published - balance, over layers: by chance above 0 in 1 % of choices, shared by the candidates
    low: float


class Choice(Record):
    """Placements of eplb tried on parts of the fitted units, and why none was where nothing was tried."""

    candidates: tuple[Trial, ...] = ()
    reason: Reason = ""

    @property
    def chosen(self) -> By:
        """The candidate whose gain is surely highest; EPLB as published where none surely gains."""
        best = max(self.candidates, key=lambda trial: trial.low, default=None)
        return best.by if best is not None and best.low > 0 else "published"


class Candidate(Record):
    """A number of redundant experts per layer, and its figures where numbers are weighed."""

    redundant: int = Field(ge=0)
    slots: int = Field(ge=1)  #: Of each device
    balance: float = Field(ge=1 - 1e-9)
    balance_p95: float = Field(ge=1 - 1e-9)
    #: Predicted of a step, or of its experts (`Redundancy.metric`); None without a profile
    seconds: float | None = Field(ge=0)
    #: Of the experts of all layers on a device; None where the sizes of the model are not known
    memory_bytes: int | None


class Redundancy(Record):
    """Numbers of redundant experts weighed against each other, and the metric."""

    metric: Currency  #: What the fewest within 2 % of the best were chosen by
    held_out: bool  #: Whether they were weighed on a part of the fitted units that they were not placed by
    candidates: tuple[Candidate, ...] = Field(min_length=1)

    @property
    def chosen(self) -> Candidate:
        """The one with the fewest whose metric is within 2 % of the best."""
        figures = [
            candidate.balance if self.metric == BALANCE else candidate.seconds or 0.0 for candidate in self.candidates
        ]
        good = [
            candidate
            for candidate, figure in zip(self.candidates, figures, strict=True)
            if figure <= NEAR * min(figures)
        ]
        return min(good, key=lambda candidate: candidate.redundant)


class Member(Record):
    """A trace of a mixture; weights sum to 1."""

    path: str
    sha256: Sha256
    weight: float = Field(gt=0, le=1)
