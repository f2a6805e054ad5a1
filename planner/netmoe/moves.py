"""The metric `samples_moved`: the share of samples that change their device in a combine, mean over layers and steps.

Legend: B steps.
"""

from ...runtime.plan import Contender, Evaluation, Metric, Part
from ..evaluate import Evaluated
from ..measures.intervals import interval, resampled_sums
from ..measures.survey import Cohort
from .online import Homes

__all__ = ["with_moves"]


def with_moves(found: Evaluated, cohorts: list[Cohort], homes: list[list[Homes]], seed: int) -> Evaluated:
    """An evaluation with this metric of every contender.

    Parameters
    ----------
    cohorts, homes
        Of the fitted samples, then of those held out where there are any; the homes by contender.
    """
    evaluation = found.evaluation
    shown = [evaluation.fit, *([evaluation.held_out] if evaluation.held_out else [])]
    parts = [_moves(*part, seed) for part in zip(shown, cohorts, homes, strict=True)]
    whole = Evaluation(fit=parts[0], held_out=parts[1] if len(parts) > 1 else None)
    return Evaluated(whole, found.judged, found.seconds)


def _moves(part: Part, cohort: Cohort, homes: list[Homes], seed: int) -> Part:
    assert cohort.step is not None
    contenders = []
    for contender, at in zip(part.contenders, homes, strict=True):
        moved_B = at.moved(cohort.step, cohort.num_steps)
        draws = resampled_sums(moved_B[:, None], seed=seed)[:, 0] / len(moved_B)
        low, high = interval(draws) if len(moved_B) > 1 else (None, None)
        metrics = {**contender.metrics, "samples_moved": Metric(value=float(moved_B.mean()), low=low, high=high)}
        contenders.append(Contender(name=contender.name, dispatch_model=contender.dispatch_model, metrics=metrics))
    return part.model_copy(update={"contenders": tuple(contenders)})
