"""How a plan fares beside its baselines, on what it was fitted to and on what it has not seen."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from ..runtime.plan import Contender, Evaluation, Part, Verdict
from ..traces.reader import Trace
from .metrics import Figures, figures
from .replay import Route, Tally, replay
from .survey import Cohort, Survey

__all__ = ["Evaluated", "evaluate", "verdict"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation as the plan stores it, and the figures of its contenders on the part that judges."""

    evaluation: Evaluation
    judged: dict[str, Figures]


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
) -> Evaluated:
    """Replay every route on the fitted and on the held-out units of a trace.

    Parameters
    ----------
    fitted_U
        Whether each unit of the survey was fitted, some of them at least; all leaves nothing held out.
    routes
        The plan first, then its baselines.
    """
    cohorts = [
        survey.cohort(mask_U, num_devices=cluster.num_devices, samples_per_step=samples_per_step)
        for mask_U in ([fitted_U] if fitted_U.all() else [fitted_U, ~fitted_U])
    ]
    tallies = replay(trace, cohorts, routes, cluster, phases=phases)
    measured = [_figures(trace, cohort, routes, row, seed) for cohort, row in zip(cohorts, tallies, strict=True)]
    shown = [_shown(cohort, routes, found) for cohort, found in zip(cohorts, measured, strict=True)]
    held_out = shown[1] if len(shown) > 1 else None
    return Evaluated(Evaluation(fit=shown[0], held_out=held_out), measured[-1])


def verdict(evaluated: Evaluated, metric: str, against: str) -> Verdict:
    """Whether the plan has less of `metric` than the contender `against`, with a paired interval."""
    plan = next(iter(evaluated.judged.values()))
    gain = plan.gain(metric, evaluated.judged[against])
    pays = gain.low is not None and gain.low > 0
    return Verdict(value="benefit" if pays else "none", metric=metric, against=against, gain=gain)


def _figures(
    trace: Trace, cohort: Cohort, routes: Sequence[Route], tallies: list[Tally], seed: int
) -> dict[str, Figures]:
    return {
        route.label: figures(
            tally,
            trace.model,
            coherent=route.dispatch_model == "coherent",
            tokens_per_step=cohort.tokens_per_step,
            seed=seed,
        )
        for route, tally in zip(routes, tallies, strict=True)
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
