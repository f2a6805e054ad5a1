"""How plans fare on any trace of their model: side by side, each against its own baseline and against the first.

Units that a plan was fitted to are left out where the trace is the plan's own.

Legend: U units.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, UsageError
from ..profilers.cluster import Cluster
from ..profilers.profile import load as load_profile
from ..runtime.plan import Metric, Part, Plan, Verdict
from ..traces.model import ModelSpec
from ..traces.reader import open_trace
from .cut import Cut, Cuts
from .entry import Entry, check_model, common_cluster, entries_of, known_model
from .evaluate import Evaluated, Replayed, judge, verdict
from .options import SecondsOptions
from .pipeline_report import pipeline_options
from .pipelined import Pipeline
from .predicted import Predicted, predicted
from .replay import replay
from .request import SAMPLES_PER_DEVICE, Phase
from .speeds import Speeds
from .survey import Survey, survey
from .tally import Route, Tally

__all__ = ["Compared", "Comparison", "compare"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One plan on the trace.

    Parameters
    ----------
    label
        Its contender's label.
    verdict
        Whether it still pays against its own baseline.
    against_first
        How it stands to the first plan, which has none.
    """

    path: str
    plan: Plan
    label: str
    verdict: Verdict
    against_first: Verdict | None

    @property
    def claimed(self) -> Metric | None:
        """The gain that it was solved with; None where that was of another metric."""
        solved = self.plan.verdict
        return solved.gain if solved is not None and solved.metric == self.verdict.metric else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans on a trace.

    Parameters
    ----------
    part
        The contenders: the plans, then their baselines.
    unit, num_fitted
        What was resampled, and how many of the trace were left out because a plan was fitted to them.
    seen
        Whether nothing else was left, so that plans are judged on what they were fitted to.
    seconds
        How seconds were predicted; None without.
    """

    trace: str
    trace_sha256: str
    cluster: Cluster
    samples_per_step: int
    part: Part
    compared: tuple[Compared, ...]
    unit: str
    num_fitted: int
    seen: bool
    seconds: SecondsOptions | None

    @property
    def failing(self) -> list[str]:
        """The plans that do not pay here: gain.low is not above 0."""
        return [one.path for one in self.compared if one.verdict.value == "none"]


def compare(
    plans: Sequence[str | os.PathLike[str]],
    trace: str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    phases: Sequence[Phase] = (),
    samples_per_step: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Evaluate plans side by side on a trace, theirs or another.

    Parameters
    ----------
    profile
        What times the parts of a step; None: links alone, where the first plan's cluster has them.
    phases
        Only tokens of these phases count; empty: all.
    samples_per_step
        Of a derived step; None: as the first plan was judged.
    seed
        Of the intervals.

    Raises
    ------
    UsageError
        A plan that cannot be compared, or not beside the others; no plan.
    MismatchError
        The trace is of another model than a plan.
    """
    entries = entries_of(plans)
    opened, cluster = open_trace(trace), common_cluster(entries, profile)
    for entry in entries:
        check_model(entry, opened)
    model = known_model(opened.model, [entry.plan for entry in entries])
    on_progress("reading the trace")
    surveyed = survey(opened, phases=phases or None)
    unseen_U = _unseen(surveyed, entries, opened.sha256)
    samples = samples_per_step or _samples_per_step(entries[0].plan)
    chosen_U = unseen_U if unseen_U.any() else np.ones_like(unseen_U)
    cohort = surveyed.cohort(chosen_U, num_devices=cluster.num_devices, samples_per_step=samples)
    timed_by = None if profile is None else load_profile(profile)
    speeds = Speeds.of(timed_by, cluster, model, samples=surveyed.kind == "sample")
    routes = _routes(entries)
    on_progress("replaying the trace under the plans and their baselines")
    (tallies,) = replay(opened, [cohort], list(routes.values()), cluster, phases=phases or None, ports=bool(speeds))
    by_label = dict(zip(routes, tallies, strict=True))
    row = _replayed(entries, routes, by_label, speeds, cluster, model)
    evaluated = judge([cohort], [row], model, speeds, seed=seed)
    return Comparison(
        trace=str(trace),
        trace_sha256=opened.sha256,
        cluster=cluster,
        samples_per_step=samples,
        part=evaluated.evaluation.fit,
        compared=tuple(_compared(entry, entries[0], evaluated) for entry in entries),
        unit=surveyed.kind,
        num_fitted=int((~unseen_U).sum()),
        seen=not unseen_U.any(),
        seconds=evaluated.seconds,
    )


def _samples_per_step(plan: Plan) -> int:
    found = plan.options.get("evaluation", {}).get("samples_per_step")
    if found is None:
        return SAMPLES_PER_DEVICE * plan.cluster.num_devices
    if type(found) is not int or not 1 <= found < 2**31:
        raise InputError(f"options.evaluation: samples_per_step {found!r:.20}; expected at least 1 and below 2^31")
    return found


def _unseen(surveyed: Survey, entries: Sequence[Entry], sha256: str) -> NDArray[np.bool_]:
    """The units that no plan was fitted to, `[U]`."""
    unseen_U = np.ones(len(surveyed.unit_ids), np.bool_)
    for source in (entry.plan.inputs.trace for entry in entries):
        if source is not None and source.sha256 == sha256:
            unseen_U &= ~surveyed.fitted(seed=source.split.seed, fraction=source.split.fit_fraction)
    return unseen_U


def _routes(entries: Sequence[Entry]) -> dict[str, Route]:
    """By label: where tokens go under each plan, then under the baselines that differ in their placement."""
    placed = [entry.baseline for entry in entries if entry.plan.decisions.pipeline is None]
    return {route.label: route for route in (*(entry.route for entry in entries), *placed)}


def _replayed(
    entries: Sequence[Entry],
    routes: dict[str, Route],
    tallies: dict[str, Tally],
    speeds: Speeds | None,
    cluster: Cluster,
    model: ModelSpec,
) -> list[Replayed]:
    """Every contender, the plans, then their baselines; beside a pipeline those without one run in one chunk."""
    piped = {entry.route.label: entry for entry in entries if entry.plan.decisions.pipeline is not None}
    if piped:
        return _pipelined(piped, routes, tallies, _checked(speeds, piped), cluster, model)
    row = []
    for label, route in routes.items():
        tally = tallies[label]
        seconds = predicted(tally, speeds, cluster, model, route.dispatch_model) if speeds else Predicted({}, {})
        row.append(Replayed(route.name, route.dispatch_model, tally, seconds))
    return row


def _pipelined(
    piped: dict[str, Entry],
    routes: dict[str, Route],
    tallies: dict[str, Tally],
    speeds: Speeds,
    cluster: Cluster,
    model: ModelSpec,
) -> list[Replayed]:
    """Every contender by the one cost model that the plans with a pipeline share."""
    options = {label: pipeline_options(entry.plan) for label, entry in piped.items()}
    models = {label: (one.backward, one.full_duplex) for label, one in options.items()}
    if len(set(models.values())) > 1:
        raise UsageError(
            f"{', '.join(models)} differ in their passes or duplex: {', '.join(map(str, models.values()))}; one cost"
            " model compares plans, so solve them alike"
        )
    backward, full_duplex = next(iter(models.values()))
    whole = Cut.equal(1, model.num_layers)
    alone = Cuts(whole, whole if backward else None)
    row, baselines = [], []
    for label, route in routes.items():
        pipeline = Pipeline(tallies[label], speeds, cluster, model, backward, full_duplex, None)
        cuts = alone
        if label in piped:
            degrees = piped[label].plan.decisions.pipeline
            assert degrees is not None
            if degrees.capacity_factor is not None:
                raise UsageError(f"{label} has a fixed capacity; what it drops on another trace is not compared")
            cuts = Cuts.of(degrees)
            name = piped[label].baseline.name
            baselines.append(Replayed(name, "standard", pipeline.tally, pipeline.predicted(alone)))
        row.append(Replayed(route.name, "standard", pipeline.tally, pipeline.predicted(cuts)))
    return row + baselines


def _checked(speeds: Speeds | None, piped: dict[str, Entry]) -> Speeds:
    """The speeds, with those that pipelines overlap."""
    if speeds is None or speeds.exchange is None or speeds.experts is None:
        raise InputError(f"the profile cannot time the exchanges or the experts that {min(piped)} overlaps")
    return speeds


def _compared(entry: Entry, first: Entry, evaluated: Evaluated) -> Compared:
    label = entry.route.label
    other = None
    if entry is not first:
        metric = "device_copies" if first.metric == "step_s" else first.metric
        other = verdict(evaluated, metric, first.route.label, of=label)
    own = verdict(evaluated, entry.metric, entry.baseline.label, of=label)
    return Compared(entry.path, entry.plan, label, own, other)
