"""Screen and page of an auto plan: all candidates in one currency, what each part adds, what does not pay, and why."""

from collections.abc import Iterator, Mapping

from ....runtime.plan import Part, Plan
from ...document import Column, Table
from ...evaluate.evaluate import MATTERS
from ...evaluate.metrics import ATTENTION, BALANCE, COMBINE, COPIES, DISPATCH, EXPERTS, KV, MOE, TAIL
from ...evaluate.price import IDEAL, STEP
from ...figures import TimeUnit
from ...options import AutoOptions, Tried

PARTS = {
    "gathering K and V takes": (KV,),
    "attention takes": (ATTENTION,),
    "dispatch and combine take": (DISPATCH, COMBINE),
    "experts take": (EXPERTS,),
}
MOST_ROWS = 10


def table(plan: Plan, part: Part) -> Table:
    """The candidates beside today, the fastest first."""
    options = AutoOptions.of(plan)
    today = options.tried[0].today
    metric = STEP if all(STEP in one.metrics and STEP in one.today for one in options.tried) else BALANCE
    best, *others = [(one.name, _share(one, metric), one.metrics) for one in options.tried]
    others = sorted(others, key=lambda row: row[1])[: MOST_ROWS - 2]
    rows = sorted([(f"{best[0]} (plan)", *best[1:]), *others, ("today", 1.0, today)], key=lambda row: row[1])
    columns = [Column("", [name for name, _, _ in rows])]
    if metric == STEP:
        seconds = [share * today[STEP] for _, share, _ in rows]
        unit = TimeUnit.up_to(max(seconds))
        columns.append(Column(f"step, {unit.name}", [unit.text(one) for one in seconds]))
    columns.append(Column("% of today", [f"{100 * share:.0f}" for _, share, _ in rows]))
    if metric == STEP and IDEAL in today:
        ideal = today[IDEAL] / today[STEP]
        whole = [share and MOE not in metrics for _, share, metrics in rows]
        shares = [f"{100 * ideal / share:.0f}" if one else "-" for one, (_, share, _) in zip(whole, rows, strict=True)]
        columns.append(Column("% of ideal", shares))
    columns.append(Column("balance (p95)", [_balance(metrics) for _, _, metrics in rows]))
    copies = [metrics.get(COPIES) for _, _, metrics in rows]
    columns.append(Column("copies/token", ["-" if one is None else f"{one:.2f}" for one in copies]))
    return Table(columns)


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """What each part adds, and what is not worth it and why."""
    options = AutoOptions.of(plan)
    best, others = options.tried[0], options.tried[1:]
    shares = {one.parts: one.share.value for one in options.tried if one.share is not None}
    if len(best.parts) > 1 and best.parts in shares:
        gains = [shares.get(best.parts[:end]) for end in range(1, len(best.parts))] + [shares[best.parts]]
        added = [
            f"{name} {100 * (before - gain):+.1f} points"
            for name, before, gain in zip(best.parts, [0.0, *gains], gains, strict=False)
            if before is not None and gain is not None
        ]
        yield f"what each part adds: {', '.join(added)}"
    carried = dict[tuple[str, ...], Tried]()
    for one in sorted(others, key=lambda one: -one.inner):
        if one.engines and one.inner >= MATTERS:
            carried.setdefault(one.engines, one)
    if carried and not best.engines:
        listed = "; ".join(f"{', '.join(engines)}: {one.name}, {_change(one)}" for engines, one in carried.items())
        yield f"moeplan.runtime carries it out; what engines can (--engine NAME): {listed}"
    for one in others:
        if len(one.parts) == 1 and one.parts[0] not in best.parts:
            yield f"not worth it: {one.name}, {_why(one, best)}"
    if options.interrupted:
        yield "interrupted: what was not tried until then is left out"
    for name, reason in options.refused.items():
        yield f"not tried: {name}: {reason}"


def _share(one: Tried, metric: str) -> float:
    """A candidate's figure over today's."""
    return one.metrics[metric] / one.today[metric] if one.today.get(metric) else 1.0


def _balance(metrics: Mapping[str, float]) -> str:
    return f"{metrics[BALANCE]:.2f} ({metrics[TAIL]:.2f})" if BALANCE in metrics and TAIL in metrics else "-"


def _change(one: Tried) -> str:
    """Gain as a change in percent."""
    return f"{-100 * one.share.value:+z.1f} %" if one.share else "0 %"


def _why(one: Tried, best: Tried) -> str:
    """What takes longer than today, or that it gains less than the plan, or no more for what it needs."""
    if one.share is None:
        return "which changes nothing"
    change = _change(one)
    if not one.shown:
        return f"{change}, which a single step does not show: give fewer tokens a step, or record more"
    grown = {
        name: sum(one.metrics.get(part, 0.0) - one.today.get(part, 0.0) for part in parts)
        for name, parts in PARTS.items()
    }
    name = max(grown, key=lambda part: grown[part])
    if one.share.value < MATTERS and grown[name] > 0 and STEP in one.metrics:
        return f"{change}: {name} {TimeUnit.worded(grown[name])} more"
    if best.share is None or one.share.value <= best.share.value:
        return change
    return f"{change}, within 1 % of the plan, which needs less, where they were compared"
