"""Screen of a flexmoe plan: every rule on the same steps, what the plan does between them, and how it was chosen."""

from collections.abc import Iterator

from ....runtime.plan import Part, Plan
from ....runtime.schedule import PLAN
from ...document import Column, Section, Table, Text
from ...evaluate.evaluate import MATTERS
from ...evaluate.metrics import BALANCE, MIGRATED
from ...evaluate.price import IDEAL, STEP
from ...figures import OF_IDEAL, TimeUnit, contender_of, figure_of, megabytes, percent
from .options import RebalancingOptions

RUNTIME = {
    "search": "moeplan's own runtime carries it out: model = parallelize(model, load_plan()), as docs/runtime.md shows",
    "paper": "a baseline: moeplan's runtime splits every step exactly, the paper's rule does not; leave --method out",
}


def table(plan: Plan, part: Part) -> Table:
    """Table of every rule beside today: seconds, balance, moves, changes of placements, and time to decide."""
    options, rows, decision = RebalancingOptions.of(plan), part.contenders, plan.decisions.rebalancing
    assert decision is not None
    followed = options.followed
    today = contender_of(part, plan.verdict.against) if plan.verdict is not None else rows[1]
    columns = [Column("", ["today" if row is today else row.name for row in rows])]
    timed = all(STEP in row.metrics for row in rows)
    if timed:
        unit, base = TimeUnit.up_to(max(figure_of(row, STEP) for row in rows)), figure_of(today, STEP)
        columns += [
            Column(f"step, {unit.name}", [unit.text(figure_of(row, STEP)) for row in rows]),
            Column("% of today", [f"{100 * figure_of(row, STEP) / base:.0f}" for row in rows]),
            Column("% of ideal", [f"{100 * figure_of(today, IDEAL) / figure_of(row, STEP):.0f}" for row in rows]),
        ]
    columns.append(Column("balance", [f"{figure_of(row, BALANCE):.3f}" for row in rows]))
    if any(MIGRATED in row.metrics for row in rows):
        moved = [row.metrics.get(MIGRATED) for row in rows]
        columns.append(Column("MB moved/step", ["-" if sent is None else megabytes(sent.value) for sent in moved]))
    known = [followed.get(row.name) for row in rows]
    if decision.quantile is not None:
        metric, what = (STEP, "layer") if options.timed else (BALANCE, "balance")
        listed = ["-" if record is None else _figure(record.figure, metric) for record in known]
        columns.append(Column(f"{what}, p{100 * decision.quantile:g}", listed))
    columns += [
        Column("changes", ["-" if record is None else f"{record.changes:,}" for record in known]),
        Column(
            "planning, all steps", ["-" if record is None else TimeUnit.worded(record.planning_s) for record in known]
        ),
    ]
    return Table(columns, note=OF_IDEAL if timed else "")


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Remarks on the best of the other rules, on what the policy did, and on who carries it out."""
    decision, options = plan.decisions.rebalancing, RebalancingOptions.of(plan)
    assert decision is not None
    record, ours = options.followed[PLAN], part.contenders[0]
    metric = STEP if STEP in ours.metrics else BALANCE
    same = (PLAN, "static") if decision.stays else (PLAN,)
    best = min(
        (contender_of(part, f"{name}/standard") for name in options.followed if name not in same),
        key=lambda row: figure_of(row, metric),
    )
    less = 1 - figure_of(ours, metric) / figure_of(best, metric)
    what = "of a step" if metric == STEP else "load on the busiest device"
    words = f"{percent(abs(less), 1)} {'less' if less >= 0 else 'more'} {what} than {best.name}, the best other rule"
    if less < MATTERS and best.name == "static":
        how = "better" if less < -MATTERS else "as well"
        words += f"; the plan's start, kept, does {how}: parallelize(model, plan, schedule={{}})"
    yield words
    if decision.stays:
        worse = "took longer" if options.timed else "was less even"
        yield f"replicas stay: every policy that was tried {worse} on the fitted steps"
    else:
        yield (
            f"a layer is looked at where its busiest device had over {percent(decision.trigger - 1)} more than the"
            f" mean{f', and after one in {decision.every} recorded steps' if decision.every else ''}:"
            f" {record.changes:,} changes of a layer's placement in {part.num_steps:,} recorded steps, of which"
            f" {record.unpaid:,} turned out to cost more than they saved until the next one, or the end;"
            f" {record.experts_moved:,} expert{'s' * (record.experts_moved != 1)} with new owners"
        )
    yield RUNTIME[decision.method]
    if not options.timed:
        yield "decided by balance alone, whatever moves cost: no profile times experts and exchanges"


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The policy, and what was tried on the fitted steps."""
    decision, options = plan.decisions.rebalancing, RebalancingOptions.of(plan)
    assert decision is not None
    stands = "" if decision.record_steps == 1 else f"; a recorded step stands for {decision.record_steps}"
    share = "" if decision.quantile is None else f", by their {decision.quantile:g} quantile"
    searches = decision.method == "search"
    over = f", over the last {decision.window} recorded ones" if decision.recent else ""
    pays = f"; a move must pay within {decision.horizon_steps:g} steps{over}" if searches else ""
    empty = ", which later steps may leave empty" if searches and not decision.stays else ""
    lines = [
        "policy    replicas stay"
        if decision.stays
        else f"policy    by the last {decision.recent or decision.window} recorded steps together{share}{pays}{stands}",
        f"slots     {options.slots} per device{empty}",
    ]
    if options.tried:
        metric = STEP if options.timed else BALANCE
        listed = ", ".join(f"{name} {_figure(figure, metric)}" for name, figure in options.tried.items())
        what = "seconds of a layer" if options.timed else "max/mean load"
        lines.append(f"tried     {what} on fitted steps: {listed}")
    yield Section("Replicas that follow the load", (Text(tuple(lines)),), verbose=True)


def _figure(number: float, metric: str) -> str:
    return TimeUnit.worded(number) if metric == STEP else f"{number:.3f}"
