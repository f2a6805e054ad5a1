"""What a strategy gives back: a decision, how it came about, and how it fares."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..runtime.decisions import Decision, Record
from ..solvers.outcome import Outcome
from .evaluate import Evaluated
from .options import EvaluationOptions

__all__ = ["Solved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A strategy's own decision with its evidence.

    Parameters
    ----------
    options
        How it was decided; the plan keeps it under the decision's name, beside `evaluation` and `seconds`.
    outcome
        On the fitted units.
    evaluated
        The plan first, then its baselines.
    against
        The label of the contender that the verdict holds the plan against.
    metric
        What the verdict is about without `step_s`; None: the strategy's own.
    judged_by, num_tokens
        How it was judged and the tokens of the trace, where the trace is in count form; None: as the task says.
    sidecars
        Name to contents of the files that lie beside the plan, which its decision names with their hashes.
    """

    decision: Decision
    options: Record
    outcome: Outcome
    evaluated: Evaluated
    against: str
    metric: str | None = None
    judged_by: EvaluationOptions | None = None
    num_tokens: int | None = None
    sidecars: Mapping[str, bytes] = field(default_factory=dict)
