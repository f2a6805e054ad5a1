"""How a plan fares beside its baselines, on what it was fitted to and on what it has not seen."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
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
    routes: Sequence[Route],
    cluster: Cluster,
    *,
    fit_fraction: float,
    seed: int,
    samples_per_step: int,
    phases: Collection[str] | None = None,
) -> Evaluated:
    """Replay every route on the fitted and on the held-out units of a trace.

    Parameters
    ----------
    routes
        The plan first, then its baselines.
    fit_fraction
        The share of units that was fitted; 1.0 leaves nothing held out.

    Raises
    ------
    InputError
        The split leaves one side empty.
    """
    cohorts = [
        survey.cohort(mask_U, num_devices=cluster.num_devices, samples_per_step=samples_per_step)
        for mask_U in _masks(trace, survey, seed, fit_fraction)
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


def _masks(trace: Trace, survey: Survey, seed: int, fit_fraction: float) -> list[NDArray[np.bool_]]:
    """Which units are fitted, and which are held out unless all are fitted, each `[U]`."""
    fitted_U = survey.fitted(seed=seed, fraction=fit_fraction)
    if not fitted_U.any() or (fit_fraction < 1 and fitted_U.all()):
        raise InputError(
            f"{trace.path}: {len(fitted_U)} {survey.kind}s split into {fitted_U.sum()} to fit and"
            f" {(~fitted_U).sum()} held out; expected some of both. Record more, or give --fit-fraction 1"
        )
    return [fitted_U] if fitted_U.all() else [fitted_U, ~fitted_U]


def _figures(
    trace: Trace, cohort: Cohort, routes: Sequence[Route], tallies: list[Tally], seed: int
) -> dict[str, Figures]:
    return {
        _label(route): figures(
            tally,
            trace.model,
            coherent=route.dispatch_model == "coherent",
            tokens_per_step=cohort.tokens_per_step,
            seed=seed,
        )
        for route, tally in zip(routes, tallies, strict=True)
    }


def _label(route: Route) -> str:
    return f"{route.name}/{route.dispatch_model}"


def _shown(cohort: Cohort, routes: Sequence[Route], found: dict[str, Figures]) -> Part:
    contenders = [
        Contender(name=route.name, dispatch_model=route.dispatch_model, metrics=found[_label(route)].metrics())
        for route in routes
    ]
    return Part(
        num_samples=len(cohort.unit_ids),
        num_tokens=cohort.num_tokens,
        num_steps=cohort.num_steps,
        dropped_samples=cohort.dropped,
        contenders=tuple(contenders),
    )
