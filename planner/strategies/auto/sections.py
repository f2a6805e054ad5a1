"""Screen and page of an auto plan: all candidates in one currency, gains of each part, and parts that do not pay."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....runtime.decisions import PipelineDecision, SamplePolicyDecision
from ....runtime.exports import ENGINES, titled, unserved
from ....runtime.plan import Part, Plan
from ....solvers.outcome import Status
from ....solvers.placement import BY_STEP
from ....traces.model import ModelSpec
from ...document import Column, Table
from ...evaluate.evaluate import MATTERS
from ...evaluate.journey import contiguous_in
from ...evaluate.metrics import ATTENTION, BALANCE, COMBINE, COPIES, DISPATCH, EXPERTS, KV, METRICS, TAIL
from ...evaluate.price import IDEAL, STEP
from ...figures import OF_IDEAL, TimeUnit, change_text, contender_of, figure_of
from ...options import EvaluationOptions
from .options import AutoOptions, Tried

PARTS = {
    "gathering K and V takes": (KV,),
    "attention takes": (ATTENTION,),
    "dispatch and combine take": (DISPATCH, COMBINE),
    "experts take": (EXPERTS,),
}
MOST_ROWS = 10
ENDED = {Status.TIME_LIMIT: "time limit", Status.INTERRUPTED: "interrupted"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a candidate, or today."""

    name: str
    share: float  #: Of today's figure
    whole: bool  #: Whether layers are not cut into chunks
    metrics: Mapping[str, float]


def table(plan: Plan, part: Part) -> Table:
    """The candidates beside today, the fastest first; of many the slowest are left out, and numbers of replicas."""
    options = AutoOptions.of(plan)
    today, best = options.tried[0].today, options.tried[0]
    shown = sorted(options.listed, key=lambda row: -row.share.value)[: MOST_ROWS - 2]
    rows = [
        Row(row.name + (" (plan)" if row is best else ""), 1 - row.share.value, _whole(row), row.metrics)
        for row in (best, *shown)
    ]
    rows = sorted([*rows, Row("today", 1.0, whole=True, metrics=today)], key=lambda row: row.share)
    columns = [Column("", [row.name for row in rows])]
    if (spec := METRICS[options.metric]).unit == "seconds":
        unit = TimeUnit.up_to(max(row.share for row in rows) * today[spec.name])
        columns.append(Column(f"{spec.column}, {unit.name}", [unit.text(row.share * today[spec.name]) for row in rows]))
    columns.append(Column("% of today", [f"{100 * row.share:.0f}" for row in rows]))
    if options.metric == STEP and IDEAL in today:
        columns.append(Column("% of ideal", [_of_ideal(row, today) for row in rows]))
    columns.append(Column("balance (p95)", [_balance(row.metrics) for row in rows]))
    if all(COPIES in row.metrics for row in rows):
        columns.append(Column("copies/token", [f"{row.metrics[COPIES]:.2f}" for row in rows]))
    left = len(options.tried) - 1 - len(shown)
    notes = [f"{left} more rows: --json"] * bool(left)
    notes += [OF_IDEAL] * any(column.header == "% of ideal" for column in columns)
    if alone := _smaller((best, *shown), options.metric):
        notes.append(f"gain of smaller steps, not scaled up: {', '.join(alone)}")
    return Table(columns, whole=True, note="; ".join(notes))


def _smaller(candidates: Sequence[Tried], metric: str) -> list[str]:
    """The names of candidates judged on smaller steps than others: those whose samples move are not scaled up."""
    least = max(candidate.today[metric] for candidate in candidates) * (1 - MATTERS)
    moving = (candidate for candidate in candidates if SamplePolicyDecision.key in candidate.decisions)
    return [candidate.name for candidate in moving if candidate.today[metric] < least]


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Reason why another candidate comes first here, plans that engines carry out, the gain of each part, and parts
    that are not worth it, with the reason.
    """
    options = AutoOptions.of(plan)
    best = options.tried[0]
    if options.status is not Status.FEASIBLE:
        yield f"{ENDED[options.status]}: the best found until then; what was not tried, or not judged, is left out"
    first = max((best, *options.listed), key=lambda candidate: candidate.share.value)
    if first is not best:
        yield f"not chosen: {first.name}, {_why(first, options)}"
    yield from _carried(options, plan.model, training=EvaluationOptions.of(plan).use == "training")
    yield from _added(options, plan, part)
    for candidate in options.listed:
        left_out = len(candidate.parts) == 1 and candidate.parts[0] not in best.parts and candidate is not first
        if left_out and (reason := _why(candidate, options)):
            yield f"not worth it: {candidate.name}, {reason}"
    alike = dict[str, list[str]]()
    for name, reason in options.refused.items():
        alike.setdefault(_shortened(reason, plan), []).append(name)
    for reason, names in alike.items():
        yield f"not tried: {'; '.join(names)}: {reason}"


def _added(options: AutoOptions, plan: Plan, part: Part) -> Iterator[str]:
    """Gain that each part adds to those before it, on the samples that judge: another form of rows comes first, then
    as many slots with experts in order.
    """
    best, shares = options.tried[0], {candidate.parts: candidate.share.value for candidate in options.tried}
    wire, names, gains = plan.decisions.wire, list[str](), [0.0]
    if plan.verdict is not None and wire is not None:
        base = contender_of(part, plan.verdict.against)
        names.append(f"{wire} rows")
        gains.append(_gain(part, f"{base.name}, {wire}/{plan.dispatch_model}", plan.verdict.against, options.metric))
    if plan.verdict is not None and (spare := _in_order(plan, part)):
        shared = ", replicas shared alike" if plan.placement and plan.placement.replica_rule in BY_STEP else ""
        names.append(f"as many slots with experts in order{shared}")
        gains.append(_gain(part, spare, plan.verdict.against, options.metric))
    ends = range(1, len(best.parts) + 1)
    if len(names) + len(best.parts) > 1 and all(best.parts[:end] in shares for end in ends):
        names, gains = [*names, *best.parts], [*gains, *(shares[best.parts[:end]] for end in ends)]
        added = [f"{name} {100 * (gains[at] - gains[at + 1]):+z.1f}" for at, name in enumerate(names)]
        yield f"what each part adds, in % of today: {', '.join(added)}"


def _gain(part: Part, label: str, against: str, metric: str) -> float:
    """Gain of a contender over another, a share."""
    base = figure_of(contender_of(part, against), metric)
    return 1 - figure_of(contender_of(part, label), metric) / base if base else 0.0


def _in_order(plan: Plan, part: Part) -> str:
    """The contender with experts in order in as many slots; empty without replicas."""
    if plan.placement is None or not plan.placement.has_replicas:
        return ""
    spare = contiguous_in(plan.placement.slots, plan.model, plan.cluster).wired(plan.decisions.wire)
    return spare.label if spare.label in {contender.label for contender in part.contenders} else ""


def _carried(options: AutoOptions, model: ModelSpec, *, training: bool) -> Iterator[str]:
    """The engines that carry out the plan, or the best candidate of each; nothing where an engine was asked for."""
    best, carried = options.tried[0], dict[str, Tried]()
    if options.engine is not None:
        return
    able = {name: engine for name, engine in ENGINES.items() if engine.trains or not training}
    if runs := [name for name in best.engines if name in able]:
        if best.share.value >= MATTERS:
            named = " and ".join(titled(able[name]) for name in runs)
            yield f"{named} can run it, too: moeplan apply PLAN --engine NAME -o DIR"
        return
    for candidate in sorted((best, *options.listed), key=lambda candidate: -candidate.inner):
        for name in candidate.engines if candidate.inner >= MATTERS else ():
            carried.setdefault(name, candidate)
    listed = "; ".join(
        # Solved for it, a little different.
        f"{titled(able[name])}: {candidate.name}, about {-100 * candidate.share.value:+z.0f} %"
        for name, candidate in carried.items()
        if name in able
    )
    lacking = "".join(f"; not {name}: {why}" for name, engine in able.items() if (why := unserved(engine, model)))
    can = f"; best plan per engine (--engine NAME): {listed}" if listed else ""
    yield f"runs in moeplan.runtime{can}{lacking}"


def _why(candidate: Tried, options: AutoOptions) -> str:
    """Reason to leave a part out; empty where its table row shows it."""
    best, change = options.tried[0], change_text(candidate.share.value)
    if not candidate.has_interval:
        return f"{change}, which a single step does not show: give fewer tokens per step, or record more"
    if candidate.share.value > best.share.value:  # here, not where they were compared
        least = f"{change_text(candidate.inner)} at worst (plan {change_text(best.inner)})"
        less = ": within 1 % of the plan, which has fewer parts or slots" if candidate.inner > best.inner else ""
        return f"{change} here; on the samples that chose, {least}{less}"
    if candidate.share.value >= MATTERS:
        return ""
    grown = {
        name: sum(candidate.metrics.get(part, 0.0) - candidate.today.get(part, 0.0) for part in parts)
        for name, parts in PARTS.items()
    }
    name = max(grown, key=lambda part: grown[part])
    if grown[name] > 0 and options.metric == STEP:
        return f"{change}: {name} {TimeUnit.worded(grown[name])} more"
    return change


def _whole(candidate: Tried) -> bool:
    return PipelineDecision.key not in candidate.decisions


def _of_ideal(row: Row, today: Mapping[str, float]) -> str:
    """Percent of the step under even loads, nothing else of today changed; of layers in chunks nothing."""
    return f"{100 * today[IDEAL] / today[STEP] / row.share:.0f}" if row.whole and row.share and today[STEP] else "-"


def _balance(metrics: Mapping[str, float]) -> str:
    return f"{metrics[BALANCE]:.2f} ({metrics[TAIL]:.2f})" if BALANCE in metrics and TAIL in metrics else "-"


def _shortened(reason: str, plan: Plan) -> str:
    """The finding of an error message, without the file before it and the mend after it."""
    for source in (plan.inputs.trace, plan.inputs.profile):
        reason = reason.removeprefix(f"{source and source.path}: ")
    return reason.partition("; ")[0]
