"""How a plan fares beside its baselines, on what it was fitted to and on what it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from ..runtime.decisions import DispatchModel
from ..runtime.plan import Contender, Evaluation, Part, Verdict
from ..traces.model import ModelSpec
from .measures.metrics import Figures, figures
from .measures.predicted import Predicted, predicted
from .measures.replay import replay
from .measures.speeds import Speeds
from .measures.survey import Cohort
from .measures.tally import Route, Tally
from .options import SecondsOptions
from .task import Task

__all__ = [
    "Evaluated",
    "Replayed",
    "assembled",
    "evaluate",
    "judge",
    "measured",
    "replayed",
    "verdict",
]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation as the plan stores it, and what it rests on.

    Parameters
    ----------
    judged
        The figures of the contenders on the part that judges, by label.
    seconds
        How seconds were predicted; None without.
    at_least
        The share of the baseline's value that a gain must be above to pay for what the metric does not hold; `step_s`
        is taken to hold all.
    """

    evaluation: Evaluation
    judged: dict[str, Figures]
    seconds: SecondsOptions | None
    at_least: float = 0.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A contender on one part of the trace: what it did there, and the seconds predicted of that.

    Parameters
    ----------
    dropped_share
        Of the routed token-expert pairs, where buffers have a fixed capacity.
    """

    name: str
    dispatch_model: DispatchModel
    tally: Tally
    predicted: Predicted
    dropped_share: float | None = None

    @property
    def label(self) -> str:
        """Its contender's label."""
        return f"{self.name}/{self.dispatch_model}"


def evaluate(task: Task, routes: Sequence[Route]) -> Evaluated:
    """Replay every route, the plan first, on the fitted and on the held-out units of a task's trace."""
    cohorts = task.cohorts
    return judge(cohorts, replayed(task, cohorts, routes), task.model, task.speeds, seed=task.request.seed)


def replayed(task: Task, cohorts: Sequence[Cohort], routes: Sequence[Route]) -> list[list[Replayed]]:
    """What every route does on every cohort of a task's trace, with its seconds, `[cohort][route]`."""
    cluster, model, speeds, phases = task.request.cluster, task.model, task.speeds, task.request.phases or None
    tallies = replay(task.source, cohorts, routes, cluster, phases=phases, ports=speeds is not None)
    return [
        [
            Replayed(
                route.name,
                route.dispatch_model,
                tally,
                predicted(tally, speeds, cluster, model, route.dispatch_model) if speeds else Predicted({}, {}),
            )
            for route, tally in zip(routes, row, strict=True)
        ]
        for row in tallies
    ]


def judge(
    cohorts: Sequence[Cohort],
    rows: Sequence[Sequence[Replayed]],
    model: ModelSpec,
    speeds: Speeds | None,
    *,
    seed: int,
) -> Evaluated:
    """The figures of contenders that were replayed.

    Parameters
    ----------
    cohorts, rows
        The fitted units, then those held out where there are any, and the contenders on each, the plan first.
    speeds
        What their seconds come from.
    """
    return assembled([[one] for one in cohorts], rows, measured(cohorts, rows, model, seed=seed), speeds)


def measured(
    cohorts: Sequence[Cohort], rows: Sequence[Sequence[Replayed]], model: ModelSpec, *, seed: int
) -> list[dict[str, Figures]]:
    """The figures of contenders by label, on every cohort."""
    return [
        {one.label: _figures(one, cohort, model, seed) for one in row}
        for cohort, row in zip(cohorts, rows, strict=True)
    ]


def assembled(
    cohorts: Sequence[Sequence[Cohort]],
    rows: Sequence[Sequence[Replayed]],
    found: Sequence[dict[str, Figures]],
    speeds: Speeds | None,
) -> Evaluated:
    """An evaluation of figures that were measured; a part is of one cohort, or of one of each of several traces."""
    shown = [_shown(*part) for part in zip(cohorts, rows, found, strict=True)]
    held_out = shown[1] if len(shown) > 1 else None
    return Evaluated(Evaluation(fit=shown[0], held_out=held_out), found[-1], _seconds(speeds, rows[-1]))


def verdict(evaluated: Evaluated, metric: str, against: str, *, of: str | None = None) -> Verdict:
    """Whether the plan has less than the contender `against`, with a paired interval.

    Parameters
    ----------
    metric
        What to judge by where their `step_s` cannot be compared.
    of
        The label of the plan; None: the first contender.
    """
    ours = of or next(iter(evaluated.judged))
    plan, base = evaluated.judged[ours], evaluated.judged[against]
    alike = ours.rpartition("/")[2] == against.rpartition("/")[2]
    metric = "step_s" if plan.step_compares(base, alike=alike) else metric
    gain, at_least = plan.gain(metric, base), 0.0 if metric == "step_s" else evaluated.at_least
    pays = gain.low is not None and gain.low > at_least * base.value[metric]
    return Verdict(value="benefit" if pays else "none", metric=metric, against=against, gain=gain, at_least=at_least)


def _figures(one: Replayed, cohort: Cohort, model: ModelSpec, seed: int) -> Figures:
    return figures(
        one.tally,
        model,
        coherent=one.dispatch_model == "coherent",
        tokens_per_step=cohort.tokens_per_step,
        seed=seed,
        seconds=one.predicted.seconds,
        crossed=one.predicted.crossed,
        dropped_share=one.dropped_share,
    )


def _seconds(speeds: Speeds | None, row: Sequence[Replayed]) -> SecondsOptions | None:
    """What timed the contenders, and of each metric the largest share of calls outside the sizes measured."""
    if speeds is None:
        return None
    timed = [one.predicted.extrapolated for one in row]
    names = sorted({name for found in timed for name in found})
    outside = {name: max(found.get(name, 0.0) for found in timed) for name in names}
    return SecondsOptions(
        sources=speeds.sources, missing=speeds.missing, extrapolated=outside, other_dtype=speeds.other_dtype
    )


def _shown(cohorts: Sequence[Cohort], row: Sequence[Replayed], found: dict[str, Figures]) -> Part:
    """What a report shows of a part.

    Raises
    ------
    InputError
        It has no token, as counts of nothing have none.
    """
    if not any(cohort.num_tokens for cohort in cohorts):
        raise InputError("no token is routed in what was fitted, or in what judges; expected some in both: record more")
    named = {one.label: one for one in row}
    contenders = [
        Contender(name=one.name, dispatch_model=one.dispatch_model, metrics=found[label].metrics())
        for label, one in named.items()
    ]
    return Part(
        num_samples=sum(len(cohort.unit_ids) for cohort in cohorts),
        num_tokens=sum(cohort.num_tokens for cohort in cohorts),
        num_steps=sum(cohort.num_steps for cohort in cohorts),
        dropped_samples=sum(cohort.dropped for cohort in cohorts),
        contenders=tuple(contenders),
    )
