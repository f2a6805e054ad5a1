"""How a plan fares beside its baselines, on what it was fitted to and on what it has not seen."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from ..runtime.plan import Contender, Evaluation, Part, Verdict
from ..traces.reader import Trace
from .metrics import Figures, figures
from .predicted import Predicted, predicted
from .replay import replay
from .speeds import Speeds
from .survey import Cohort, Survey
from .tally import Route, Tally

__all__ = ["Evaluated", "evaluate", "verdict"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation as the plan stores it, and what it rests on.

    Parameters
    ----------
    judged
        The figures of the contenders on the part that judges.
    extrapolated
        Metric of seconds to the largest share, over these contenders, of calls outside the sizes measured.
    """

    evaluation: Evaluation
    judged: dict[str, Figures]
    extrapolated: dict[str, float]


def evaluate(
    trace: Trace,
    survey: Survey,
    fitted_U: NDArray[np.bool_],
    routes: Sequence[Route],
    cluster: Cluster,
    *,
    seed: int,
    samples_per_step: int,
    phases: Collection[str] | None = None,
    speeds: Speeds | None = None,
) -> Evaluated:
    """Replay every route on the fitted and on the held-out units of a trace.

    Parameters
    ----------
    fitted_U
        Whether each unit of the survey was fitted, some of them at least; all leaves nothing held out.
    routes
        The plan first, then its baselines.
    speeds
        None: no seconds.
    """
    cohorts = [
        survey.cohort(mask_U, num_devices=cluster.num_devices, samples_per_step=samples_per_step)
        for mask_U in ([fitted_U] if fitted_U.all() else [fitted_U, ~fitted_U])
    ]
    tallies = replay(trace, cohorts, routes, cluster, phases=phases, ports=speeds is not None)
    timed = [
        [_predicted(trace, route, tally, speeds, cluster) for route, tally in zip(routes, row, strict=True)]
        for row in tallies
    ]
    measured = [
        _figures(trace, cohort, routes, row, seconds, seed)
        for cohort, row, seconds in zip(cohorts, tallies, timed, strict=True)
    ]
    shown = [_shown(cohort, routes, found) for cohort, found in zip(cohorts, measured, strict=True)]
    held_out = shown[1] if len(shown) > 1 else None
    return Evaluated(Evaluation(fit=shown[0], held_out=held_out), measured[-1], _outside(timed[-1]))


def verdict(evaluated: Evaluated, metric: str, against: str) -> Verdict:
    """Whether the plan has less than the contender `against`, with a paired interval.

    Parameters
    ----------
    metric
        What to judge by where their `step_s` cannot be compared.
    """
    (ours, plan), base = next(iter(evaluated.judged.items())), evaluated.judged[against]
    alike = ours.split("/")[1] == against.split("/")[1]
    metric = "step_s" if plan.step_compares(base, alike=alike) else metric
    gain = plan.gain(metric, base)
    pays = gain.low is not None and gain.low > 0
    return Verdict(value="benefit" if pays else "none", metric=metric, against=against, gain=gain)


def _predicted(trace: Trace, route: Route, tally: Tally, speeds: Speeds | None, cluster: Cluster) -> Predicted:
    if speeds is None:
        return Predicted({}, {})
    return predicted(tally, speeds, cluster, trace.model, route.dispatch_model)


def _outside(timed: Sequence[Predicted]) -> dict[str, float]:
    names = sorted({name for found in timed for name in found.extrapolated})
    return {name: max(found.extrapolated.get(name, 0.0) for found in timed) for name in names}


def _figures(
    trace: Trace, cohort: Cohort, routes: Sequence[Route], tallies: list[Tally], timed: list[Predicted], seed: int
) -> dict[str, Figures]:
    return {
        route.label: figures(
            tally,
            trace.model,
            coherent=route.dispatch_model == "coherent",
            tokens_per_step=cohort.tokens_per_step,
            seed=seed,
            seconds=found.seconds,
        )
        for route, tally, found in zip(routes, tallies, timed, strict=True)
    }


def _shown(cohort: Cohort, routes: Sequence[Route], found: dict[str, Figures]) -> Part:
    contenders = [
        Contender(name=route.name, dispatch_model=route.dispatch_model, metrics=found[route.label].metrics())
        for route in routes
    ]
    return Part(
        num_samples=len(cohort.unit_ids),
        num_tokens=cohort.num_tokens,
        num_steps=cohort.num_steps,
        dropped_samples=cohort.dropped,
        contenders=tuple(contenders),
    )
