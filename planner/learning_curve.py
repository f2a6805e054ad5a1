"""The learning curve: what a placement fitted to fewer tokens gains on the samples held out.

Legend: R bootstrap draws.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..runtime.plan import Metric
from ..solvers.exflow.budget import layer_work
from ..solvers.outcome import PlacementResult, Status
from ..solvers.placement import Placement
from .evaluate.evaluate import evaluate
from .evaluate.journey import Contender, Journey, contiguous_in, today
from .evaluate.metrics import Figures, copies_metric
from .evaluate.sums import DRAWS, interval
from .request import Request
from .solve import task_for
from .strategies.exflow.solve import params_of, place
from .strategies.placement import PlacementStrategy
from .task import Task

__all__ = ["LearningCurve", "Point", "learning_curve"]

SUBSETS = 3  # of every size but the largest
HALVINGS = 7
# Work of a solve (`solvers.exflow`), so that time ends none where there is enough of it: at least, and as many times as
# its layers take to be assigned anew.
WORK, ASSIGNED = 5e7, 10
FEWEST_UNITS = 2


@dataclass(frozen=True, slots=True)
class Point:
    """Gain on held-out units of a placement fitted to a given number of units.

    Parameters
    ----------
    num_tokens
        Of the units, mean over the subsets drawn.
    gain
        Fewer copies than contiguous experts have under the same dispatch model, mean over the subsets; the interval is
        over subsets and held-out units.
    """

    num_units: int
    num_tokens: int
    num_subsets: int
    gain: Metric


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """The gain by the number of units fitted.

    Parameters
    ----------
    metric
        The copies that gains are of (`metrics.copies_metric`).
    points
        In ascending size.
    last_doubling
        What the last doubling of the fitted units gained.
    num_capped
        Solves that the time limit ended, so that another run may find others.
    wall_s
        Seconds of all solves together.
    """

    unit: str
    dispatch_model: str
    metric: str
    points: tuple[Point, ...]
    last_doubling: Metric
    num_solves: int
    num_capped: int
    wall_s: float = field(compare=False)

    @property
    def saturated(self) -> bool:
        """Whether the last doubling gained less than 2 % of all, so that more tokens would hardly help."""
        return self.last_doubling.value < 0.02 * self.points[-1].gain.value

    def enough(self, share: float) -> Point:
        """The smallest size from which on every gain is at least a share of the last."""
        good = [one.gain.value >= share * self.points[-1].gain.value for one in self.points]
        return self.points[max((place + 1 for place, fine in enumerate(good[:-1]) if not fine), default=0)]


def learning_curve(request: Request, *, on_progress: Callable[[str], None] = lambda _: None) -> LearningCurve:
    """The curve of exflow on a trace: subsets of the fitted units in doubling sizes, several of each.

    Parameters
    ----------
    request
        As for a plan; its time limit is that of all solves together.

    Raises
    ------
    UsageError
        Another strategy, nothing held out, too few units to halve, a cap on loads, or a thorough bound.
    KeyboardInterrupt
        A search was interrupted.
    """
    if request.strategy != "exflow" or request.previous is not None:
        raise UsageError("--learning-curve with --from or another strategy; it is of exflow's placements from nothing")
    if request.fit_fraction == 1:
        raise UsageError("--learning-curve with --fit-fraction 1; expected units held out to judge by: give less")
    task = task_for(request, on_progress)
    params = params_of(task)
    if params.bound != "simple":
        raise UsageError(f"--learning-curve with --bound {params.bound}; it bounds no placement: leave it away")
    if params.max_load is not None:
        raise UsageError("--learning-curve with --max-load; few samples cannot be placed as evenly: leave it away")
    subsets = list(_subsets(np.flatnonzero(task.fitted), request.seed))
    shared = dataclasses.replace(params, time_limit_s=params.time_limit_s / len(subsets))
    task = dataclasses.replace(task, request=dataclasses.replace(request, params=shared))
    _placed(task, subsets[-1], work=1.0)  # loads and compiles the solvers, in nobody's time
    work = max(WORK, ASSIGNED * task.model.num_layers * layer_work(task.model.num_experts, int(task.slots.sum())))
    placed, started = [], time.perf_counter()
    for number, chosen in enumerate(subsets, start=1):
        on_progress(f"solving {number} of {len(subsets)}: {len(chosen)} {task.units.kind}s")
        placed.append(_placed(task, chosen, work=work))
    wall_s = time.perf_counter() - started
    on_progress("replaying the held-out samples")
    judged = _judged(task, [one.placement for one in placed])
    return _curve(task, subsets, judged, sum(one.outcome.status is Status.TIME_LIMIT for one in placed), wall_s)


def _subsets(fitted: NDArray[np.int64], seed: int) -> Iterator[NDArray[np.int64]]:
    """Places of units: all fitted ones, then random halves, quarters and so on."""
    rng, size = np.random.default_rng(seed), len(fitted)
    if size < FEWEST_UNITS:
        raise UsageError(f"--learning-curve of {size} fitted unit(s); expected {FEWEST_UNITS} or more: record more")
    yield fitted
    for _ in range(min(HALVINGS, size.bit_length() - 1)):
        size //= 2
        for _ in range(SUBSETS):
            yield np.sort(rng.permutation(fitted)[:size])


def _placed(task: Task, chosen: NDArray[np.int64], *, work: float) -> PlacementResult:
    """The placement that these units give; none where Ctrl-C ended its search."""
    assert isinstance(task.strategy, PlacementStrategy)
    found = place(task.strategy.counted(task, chosen), task, task.slots, work=work)
    if found.outcome.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return found


def _judged(task: Task, placements: Sequence[Placement]) -> list[Figures]:
    """The figures of every placement on the held-out units, then those of contiguous."""
    contenders = [
        Contender(f"subset {number}", Journey(task.dispatch_model, placed)) for number, placed in enumerate(placements)
    ]
    in_order = contiguous_in(task.slots, task.model, task.request.cluster) or today(
        task.model, task.request.cluster, task.slots
    )
    contenders.append(in_order.named("contiguous", dispatch_model=task.dispatch_model))
    held_out = dataclasses.replace(task.scene, cohorts=task.cohorts[1:], costs=None)
    return list(evaluate(held_out, contenders).judged.values())


def _curve(
    task: Task, subsets: Sequence[NDArray[np.int64]], judged: Sequence[Figures], num_capped: int, wall_s: float
) -> LearningCurve:
    *found, base = judged
    metric = copies_metric(task.dispatch_model, task.request.cluster)
    rng, by_size = np.random.default_rng(task.request.seed), {}
    for size in sorted({len(one) for one in subsets}):
        at = [number for number, one in enumerate(subsets) if len(one) == size]
        gains = np.array([base.value[metric] - found[number].value[metric] for number in at])
        drawn_R = np.array([_draws(base, metric) - _draws(found[number], metric) for number in at])[
            rng.integers(len(at), size=DRAWS), np.arange(DRAWS)
        ]
        tokens = np.mean([task.units.unit_tokens[subsets[number]].sum() for number in at])
        by_size[size] = Point(size, round(float(tokens)), len(at), _metric(float(gains.mean()), drawn_R)), drawn_R
    *_, (half, half_R), (last, last_R) = by_size.values()
    return LearningCurve(
        unit=task.units.kind,
        dispatch_model=task.dispatch_model,
        metric=metric,
        points=tuple(point for point, _ in by_size.values()),
        last_doubling=_metric(last.gain.value - half.gain.value, last_R - half_R),
        num_solves=len(subsets),
        num_capped=num_capped,
        wall_s=wall_s,
    )


def _metric(value: float, drawn_R: NDArray[np.float64]) -> Metric:
    low, high = interval({"": np.concatenate([[value], drawn_R])[None]})
    return Metric(value=value, low=low, high=high)


def _draws(figures: Figures, metric: str) -> NDArray[np.float64]:
    """The resampled values of a metric, `[R]`."""
    (levels_QR,) = figures.summands[metric].values()
    return levels_QR[0, 1:]
