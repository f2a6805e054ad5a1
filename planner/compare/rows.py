"""The contenders of a comparison, replayed: every plan, then the baselines, timed by one cost model.

Legend: B steps; C counts; U units.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...errors import InputError, UsageError
from ...runtime.plan import Plan
from ...solvers.seconds import total
from ..evaluate import Replayed
from ..measures.dropped import dropped_share, sent_pairs
from ..measures.predicted import Predicted, predicted
from ..measures.replay import replay
from ..measures.speeds import Speeds
from ..measures.survey import Cohort
from ..measures.tally import COUNTS, Route, Tally
from ..netmoe.run import EXCHANGE
from ..pipeline.cut import Cut, Cuts
from ..pipeline.pipelined import Pipeline
from ..pipeline.report import pipeline_options
from .entry import Entry
from .policies import moved
from .setting import Setting

__all__ = ["contenders"]

Read = TypeVar("Read")


def contenders(entries: Sequence[Entry], setting: Setting) -> list[Replayed]:
    """Every contender once, the plans first.

    Raises
    ------
    UsageError
        Pipelines of unlike passes; a fixed capacity that holds no row here; samples that cannot be moved.
    InputError
        The profile cannot time what a pipeline overlaps; a pipeline whose passes cut each other unevenly; a predictor
        that is missing or another one.
    """
    piped = [entry for entry in entries if entry.plan.judges_pipeline]
    policies = [entry for entry in entries if entry.policy]
    placed = [entry for entry in entries if not entry.policy]
    found = _pipelined(entries, piped, setting) if piped else _placed(placed, setting)
    found += moved(policies, setting) if policies else []
    by_label = {one.label: one for one in reversed(found)}
    plans, baselines = ([one.label for one in routes] for routes in _routes(entries))
    if both := {*plans} & {*baselines}:
        raise UsageError(f"{min(both)}: a plan named as a baseline of the table is; rename its file")
    return [by_label[label] for label in dict.fromkeys([*plans, *baselines])]


def _routes(entries: Sequence[Entry]) -> tuple[list[Route], list[Route]]:
    """The plans', and their baselines'."""
    return [entry.route for entry in entries], [one for entry in entries for one in entry.baselines]


def _placed(entries: Sequence[Entry], setting: Setting) -> list[Replayed]:
    """Placements and their baselines, tokens walked from device to device."""
    return [
        Replayed(route.name, route.dispatch_model, tally, _seconds(route, tally, setting))
        for route, tally in _tallies(entries, setting)
    ]


def _tallies(entries: Sequence[Entry], setting: Setting) -> list[tuple[Route, Tally]]:
    """Every route of plans and baselines once, and what it does with the judges; counted by step where samples move."""
    if not entries:
        return []
    named = {one.label: one for row in _routes(entries) for one in row}
    routes = [replace(one, replica_rule=setting.replica_rule) for one in named.values()]
    cohort, phases, timed = setting.judges.walked, setting.phases or None, setting.speeds is not None
    (tallies,) = replay(
        setting.source, [cohort], routes, setting.cluster, phases=phases, ports=timed, between=setting.between
    )
    if setting.judges.called is not None:
        tallies = [_by_step(tally, cohort) for tally in tallies]
    return list(zip(routes, tallies, strict=True))


def _by_step(tally: Tally, cohort: Cohort) -> Tally:
    """A tally whose counts are of whole steps, as those of moved samples are."""
    assert cohort.step is not None
    counts_BC, kept_U = np.zeros((cohort.num_steps, len(COUNTS)), np.int64), cohort.step >= 0
    np.add.at(counts_BC, cohort.step[kept_U], tally.counts[kept_U])
    return replace(tally, counts=counts_BC)


def _seconds(route: Route, tally: Tally, setting: Setting) -> Predicted:
    """The seconds of a step; of both exchanges together, too, beside sample policies, which are judged by them."""
    if setting.speeds is None:
        return Predicted({}, {})
    found = predicted(tally, setting.speeds, setting.cluster, setting.model, route.dispatch_model)
    if setting.judges.called is not None and setting.speeds.exchange:
        found.seconds[EXCHANGE] = total([found.seconds["dispatch_s"], found.seconds["combine_s"]])
    return found


def _pipelined(entries: Sequence[Entry], piped: Sequence[Entry], setting: Setting) -> list[Replayed]:
    """Every contender by the one cost model of the plans with a pipeline, the others in one chunk."""
    (backward, full_duplex), speeds = _passes(piped), _checked(setting.speeds, piped[0])
    whole, row = Cut.equal(1, setting.model.num_layers), []
    by_label = {one.label: entry for entry in piped for one in (entry.route, *entry.baselines)}
    planned = {entry.path: _read(entry, _cuts) for entry in piped}
    for route, tally in _tallies(entries, setting):
        entry, cuts, factor = by_label.get(route.label), Cuts(whole, whole if backward else None), None
        if entry is not None and (degrees := entry.plan.decisions.pipeline) is not None:
            factor, cuts = degrees.capacity_factor, planned[entry.path] if route.name == entry.path else cuts
        pipeline = Pipeline(tally, speeds, setting.cluster, setting.model, backward, full_duplex, factor)
        dropped = _dropped(route, pipeline, cuts.forward, setting) if factor is not None else None
        row.append(Replayed(route.name, "standard", tally, pipeline.predicted(cuts), dropped))
    return row


def _cuts(plan: Plan) -> Cuts:
    assert plan.decisions.pipeline is not None
    return Cuts.of(plan.decisions.pipeline)


def _read(entry: Entry, what: Callable[[Plan], Read]) -> Read:
    """`what` of an entry's plan, which is named where that is refused."""
    try:
        return what(entry.plan)
    except InputError as error:
        raise InputError(f"{entry.path}: {error}") from error


def _passes(piped: Sequence[Entry]) -> tuple[float, bool]:
    """What the pipelines' backward pass takes, and whether combines have a channel of their own: alike for all."""
    options = {entry.path: _read(entry, pipeline_options) for entry in piped}
    found = {(one.backward, one.full_duplex) for one in options.values()}
    if len(found) > 1:
        raise UsageError(
            f"{', '.join(options)} differ in their passes or duplex: {', '.join(map(str, sorted(found)))}; one cost"
            " model compares plans, so solve them alike"
        )
    return found.pop()


def _dropped(route: Route, pipeline: Pipeline, cut: Cut, setting: Setting) -> float:
    """The share of pairs that a fixed capacity drops on this trace."""
    if not pipeline.capacity[pipeline.tally.loads.any(axis=2)].all():
        raise UsageError(
            f"{route.name}: its fixed capacity holds no row in some step of this trace, so that nothing is computed"
            " there; compare it with more --samples-per-step, or on longer samples"
        )
    cohorts, phases = [setting.judges.cohort], setting.phases or None
    (sent_BLDE,) = sent_pairs(setting.trace, cohorts, setting.cluster, phases=phases)
    return dropped_share(sent_BLDE, cut.padded(pipeline.capacity))


def _checked(speeds: Speeds | None, piped: Entry) -> Speeds:
    """The speeds, with those that pipelines overlap."""
    if speeds is None or speeds.exchange is None or speeds.experts is None:
        raise InputError(f"the profile cannot time the exchanges or the experts that {piped.path} overlaps")
    return speeds
