"""The learning curve of exflow: gain of a placement on held-out samples by the tokens that it was fitted to.

Legend: S subsets; R a figure, then its bootstrap draws.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from ..errors import UsageError
from ..runtime.plan import Metric
from ..solvers.arrays import Floats, Ints
from ..solvers.exflow.budget import layer_work
from ..solvers.outcome import PlacementResult, Status
from ..traces.counts import Counts
from ..workers import SERIAL, Workers
from .document import Column, Section, Table, Text, to_console, write_page
from .evaluate.evaluate import evaluate
from .evaluate.journey import Contender, Journey, contiguous_in
from .evaluate.metrics import NODE_COPIES, copies_metric, metric_of
from .evaluate.sums import difference
from .figures import percent, spanned
from .picture import Axis, Line, Plot
from .request import Request
from .solve import task_for
from .strategies.exflow import ExflowParams
from .strategies.exflow.strategy import Exflow
from .task import Task

if TYPE_CHECKING:
    from rich.console import Console

SUBSETS = 3  # of every size but the largest
HALVINGS = 7
# Work of a solve (`solvers.exflow`), so that time ends none where there is enough of it: at least, and as many times as
# its layers take to be assigned anew.
WORK, ASSIGNED = 5e7, 10
FEWEST_UNITS = 2
SHARES = (0.95, 0.99)  # of the last gain


@dataclass(frozen=True, slots=True)
class Point:
    """Gain on held-out units of a placement fitted to a given number of units."""

    num_units: int
    num_tokens: int  #: Of the units, mean over the subsets drawn
    num_subsets: int
    #: Fewer copies than contiguous experts have under the same dispatch model, mean over the subsets; the interval is
    #: over subsets and held-out units
    gain: Metric


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """The gain by the number of units fitted."""

    unit: str
    dispatch_model: str
    metric: str  #: The copies that gains are of (`metrics.copies_metric`)
    points: tuple[Point, ...]  #: In ascending size
    last_doubling: Metric  #: What the last doubling of the fitted units gained
    num_solves: int
    num_capped: int  #: Solves that the time limit ended, so that another run may find others
    wall_s: float = field(compare=False)  #: Seconds of all solves together

    @property
    def saturated(self) -> bool:
        """Check whether the last doubling gained less than 2 % of all, so that more tokens would hardly help."""
        return self.last_doubling.value < 0.02 * self.points[-1].gain.value

    def enough(self, share: float) -> Point:
        """The smallest size from which on every gain is at least a share of the last."""
        good = [one.gain.value >= share * self.points[-1].gain.value for one in self.points]
        return self.points[max((place + 1 for place, fine in enumerate(good[:-1]) if not fine), default=0)]


def learning_curve(
    request: Request, *, on_progress: Callable[[str], None] = lambda _: None, workers: Workers = SERIAL
) -> LearningCurve:
    """The curve of exflow on a trace: subsets of the fitted units in doubling sizes, several of each.

    The request is as for a plan; its time limit is that of all solves together, which `workers` share. UsageError for
    another strategy, a cap on loads, a thorough bound, nothing held out or too few units to halve; Ctrl-C is
    `KeyboardInterrupt`.
    """
    if request.strategy != "exflow" or request.previous is not None:
        raise UsageError("--learning-curve with --from or another strategy; it is of exflow's placements alone")
    if request.fit_fraction == 1:
        raise UsageError("--learning-curve with --fit-fraction 1; expected units held out to judge by: give less")
    task = task_for(request, on_progress, workers)
    params = ExflowParams.of(task.params)
    if params.bound != "simple":
        raise UsageError(f"--learning-curve with --bound {params.bound}; it bounds no placement: leave it away")
    if params.max_load is not None:
        raise UsageError("--learning-curve with --max-load; few samples cannot be placed as evenly: leave it away")
    subsets = list(_subsets(np.flatnonzero(task.fitted), request.seed))
    shared = replace(params, time_limit_s=params.time_limit_s * workers.size / len(subsets))
    task = replace(task, request=replace(request, params=shared))
    _placed(task, _counted(task, subsets[-1]), 1.0)  # loads and compiles the solvers, in nobody's time
    work = max(WORK, ASSIGNED * task.model.num_layers * layer_work(task.model.num_experts, int(task.slots.sum())))
    placed, started, sent = dict[int, PlacementResult](), time.perf_counter(), workers.broadcast(task.portable())
    for number, result in workers.as_completed(_placed, ((sent, _counted(task, one), work) for one in subsets)):
        placed[number] = result
        on_progress(f"solved {len(placed)} of {len(subsets)}: {len(subsets[number])} {task.units.kind}s")
    wall_s = time.perf_counter() - started
    on_progress("replaying the held-out samples")
    return _curve(task, subsets, [result for _, result in sorted(placed.items())], wall_s)


def curve_report(curve: LearningCurve, console: "Console") -> None:
    """The points as a table, and whether more tokens would help."""
    points, last = curve.points, curve.points[-1].gain.value
    columns = [
        Column("fit tokens", [f"{point.num_tokens:,}".rjust(len("fit tokens")) for point in points]),
        Column(f"{curve.unit}s", [str(point.num_units) for point in points]),
        Column("subsets", [str(point.num_subsets) for point in points]),
        Column("fewer copies held out (95 %)", [_ranged(point.gain) for point in points]),
        Column("of the last", [percent(point.gain.value / last, 1) if last > 0 else "-" for point in points]),
    ]
    places = "nodes" if curve.metric == NODE_COPIES else "devices"
    what = f"copies to other {places}, per token and layer, fewer than contiguous, {curve.dispatch_model}"
    sections = [Section("", (Table(columns, whole=True), Text.of(what))), Section("", (Text.of(*_words(curve)),))]
    to_console(sections, console)


def as_dict(curve: LearningCurve) -> dict[str, Any]:
    """The curve as a JSON object."""
    fields: dict[str, Any] = TypeAdapter(LearningCurve).dump_python(curve, mode="json")
    return fields | {"saturated": curve.saturated}


def write_curve(curve: LearningCurve, path: Path) -> None:
    """The curve as a page."""
    text = f"Copies that a placement saves on held-out {curve.unit}s, by the tokens that it was fitted to."
    section = Section("Learning curve", (Text.of(*_words(curve)), _drawn(curve)))
    write_page(path, "How many tokens are enough", text, [section])


def _subsets(fitted: Ints, seed: int) -> Iterator[Ints]:
    """Places of units: all fitted ones, then random halves, quarters and so on."""
    rng, size = np.random.default_rng(seed), len(fitted)
    if size < FEWEST_UNITS:
        raise UsageError(f"--learning-curve of {size} fitted unit(s); expected {FEWEST_UNITS} or more: record more")
    yield fitted
    for _ in range(min(HALVINGS, size.bit_length() - 1)):
        size //= 2
        for _ in range(SUBSETS):
            yield np.sort(rng.permutation(fitted)[:size])


def _counted(task: Task, chosen: Ints) -> Counts:
    """The counts of these units."""
    assert isinstance(task.strategy, Exflow)
    return task.strategy.counted(task, chosen)


def _placed(task: Task, counts: Counts, work: float) -> PlacementResult:
    """The placement that these counts give; none where Ctrl-C ended its search."""
    assert isinstance(task.strategy, Exflow)
    placed = task.strategy.place(counts, task, task.slots, work=work)
    if placed.outcome.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return placed


def _curve(task: Task, subsets: Sequence[Ints], placed: Sequence[PlacementResult], wall_s: float) -> LearningCurve:
    """The curve of the placements of subsets, judged beside contiguous on the held-out units."""
    model, cluster = task.dispatch_model, task.request.cluster
    contenders = [Contender(f"subset {n}", Journey(model, one.placement)) for n, one in enumerate(placed)]
    contenders.append(contiguous_in(task.slots, task.model, cluster).named("contiguous", dispatch_model=model))
    held_out = replace(task.scene, cohorts=task.scene.cohorts[1:], costs=None)
    metric = copies_metric(model, cluster)
    *figures, base = (one.summands[metric] for one in evaluate(held_out, contenders).judged.values())
    less_SR = np.concatenate([levels_QR for one in figures for levels_QR in difference(one, base).values()])
    size_S = np.array([len(one) for one in subsets])
    tokens_S = np.array([task.units.unit_tokens[one].sum() for one in subsets])
    rng, draw = np.random.default_rng(task.request.seed), np.arange(1, less_SR.shape[1])
    points, gains = list[Point](), list[Floats]()
    for size in np.unique(size_S).tolist():
        of_size = np.flatnonzero(size_S == size)
        drawn_R = less_SR[of_size[rng.integers(len(of_size), size=len(draw))], draw]
        gains.append(np.concatenate([[less_SR[of_size, 0].mean()], drawn_R]))
        tokens = round(float(tokens_S[of_size].mean()))
        points.append(Point(size, tokens, len(of_size), metric_of({"": gains[-1][None]})))
    return LearningCurve(
        unit=task.units.kind,
        dispatch_model=model,
        metric=metric,
        points=tuple(points),
        last_doubling=metric_of({"": (gains[-1] - gains[-2])[None]}),
        num_solves=len(subsets),
        num_capped=sum(one.outcome.status is Status.TIME_LIMIT for one in placed),
        wall_s=wall_s,
    )


def _words(curve: LearningCurve) -> list[str]:
    points, step = curve.points, curve.last_doubling
    if points[-1].gain.value <= 0:
        return ["no gain at any size: no number of tokens is enough"]
    doubled = f"the last doubling, to {points[-1].num_tokens:,} tokens, saved {_ranged(step)} copies more"
    if curve.saturated:
        more = "more tokens would hardly help"
    elif step.low is None or step.low <= 0:
        more = "that more tokens would help is not shown"
    else:
        more = "more tokens would help: record more"
    solved = f"{curve.num_solves} solves in {curve.wall_s:.0f} s"
    if curve.num_capped:
        solved += f", {curve.num_capped} ended by time: another run may differ; give them more with --time-limit"
    return [*(_enough(curve, share) for share in SHARES), f"{doubled}: {more}", solved]


def _enough(curve: LearningCurve, share: float) -> str:
    """Fewest tokens that give a share of the last gain, in words; units are not divided to try fewer."""
    point = curve.enough(share)
    if point is curve.points[-1]:
        return f"{percent(share)} of the last gain from all {point.num_tokens:,} tokens only"
    if point is not curve.points[0]:
        return f"{percent(share)} of the last gain from {point.num_tokens:,} tokens on"
    fewest = f"{point.num_tokens:,} tokens, {point.num_units} {curve.unit}{'s' if point.num_units > 1 else ''}"
    return f"{percent(share)} of the last gain already from the fewest tried on, {fewest}; perhaps from fewer"


def _ranged(metric: Metric) -> str:
    return spanned(metric, "{:.3f}".format, " to ")


def _drawn(curve: LearningCurve) -> Plot:
    tokens, gains = [one.num_tokens for one in curve.points], [one.gain for one in curve.points]
    values = [gain.value for gain in gains]
    low, high = ([value if end is None else end for value, end in zip(values, ends, strict=True)]
                 for ends in ([gain.low for gain in gains], [gain.high for gain in gains]))  # fmt: skip
    lines = [Line(tokens, values), Line(tokens, values, shape="dots", low=low, high=high)]
    return Plot("", lines, Axis("fit tokens", log=True), Axis("copies saved per token and layer", zero=True))
