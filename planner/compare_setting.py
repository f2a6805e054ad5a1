"""The setting of a comparison: what plans are replayed on, and what times them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..profilers.cluster import Cluster
from ..traces.count_form import CountTrace, of_tokens
from ..traces.model import ModelSpec
from ..traces.reader import Trace
from .compare_judges import Judges
from .request import Phase
from .speeds import Speeds

__all__ = ["Setting"]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A trace, who of it judges, and the one cost model of a comparison.

    Parameters
    ----------
    model
        The trace's, sizes that it lacks as the plans know them.
    speeds
        None without a profile and without links.
    """

    source: Trace | CountTrace
    judges: Judges
    cluster: Cluster
    model: ModelSpec
    speeds: Speeds | None
    phases: Sequence[Phase]
    samples_per_step: int

    @property
    def trace(self) -> Trace:
        """The trace of tokens; refused in count form."""
        return of_tokens(self.source)
