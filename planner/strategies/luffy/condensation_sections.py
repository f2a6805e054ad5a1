"""Screen and page of a plan that condenses rows: what it saves, what that costs where it is known, and its rivals."""

from collections.abc import Callable, Iterator

from ....runtime.plan import Metric, Plan
from ...document import Column, Section, Table, Text
from ...figures import percent
from ...options import EvaluationOptions
from .options import CondensationOptions, CondensedPart, WayRecord


def answer(plan: Plan) -> str:
    """The rows saved, and their price where it is known."""
    options = CondensationOptions.of(plan)
    part, use = options.judging, EvaluationOptions.of(plan).use
    ours, unseen = part.ways[0], "unseen" if options.held_out else "fitted"
    price = "error not known"
    if ours.bits is not None and part.loss_bits is not None:
        price = f"{_bits(ours.bits)} bits of loss per token (95 %: {_interval(ours.bits)}; {part.loss_bits:.4f} before)"
    steps = f"{part.num_steps:,} step{'s' * (part.num_steps != 1)}"
    return (
        f"RESULTS CHANGE: {percent(ours.rows_saved, 1)} fewer rows to other devices, {price};"
        f" {use or 'steps'}, {part.tokens_per_step:,.0f} tokens per step, on {part.num_samples:,} {unseen} samples"
        f" ({steps})"
    )


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The plan beside its rivals, remarks, and rows by layer."""
    options, decision = CondensationOptions.of(plan), plan.decisions.condensation
    if decision is None:
        return
    part = options.judging
    yield Section("Ways to send rows", (_table(part), Text((*_remarks(options, part),))))
    if decision.tau is not None:
        rule = f"gate weights times distance at most tau {decision.tau:.4g}"
    else:
        rule = f"cosines of at least {decision.threshold if decision.h_max is None else decision.h_max:.4g}"
    what = "the kept row as it is" if decision.medoid else "the mean of the rows"
    lines = (
        f"rule      {rule}; what travels is {what}; schedule {decision.schedule}",
        f"rows      {part.rows_per_step:,.0f} per step to other devices, all layers, in each of dispatch and combine",
    )
    ours = part.ways[0]
    layers = Column("rows saved", [f"layer {layer}" for layer in range(len(ours.layers_saved))])
    shares = Column(ours.name, [percent(share, 1) for share in ours.layers_saved])
    yield Section("Condensation", (Text(lines), Table([layers, shares])), verbose=True)


def _remarks(options: CondensationOptions, part: CondensedPart) -> Iterator[str]:
    if options.evidence == "hidden states":
        yield (
            "what this costs is not known: only the model tells; give --model and --text, or watch the loss of a run"
            " with and without"
        )
    else:
        yield f"bits and errors are of {options.model} on the trace's own text; other text and training may differ"
    by_name = {one.name: one for one in part.ways}
    if (fp8 := by_name.get("fp8 rows alone")) is not None and fp8.bits is not None and fp8.bytes_saved is not None:
        yield f"fp8 rows alone save {percent(fp8.bytes_saved)} of the bytes at {_bits(fp8.bits)} bits; all rows travel"
    yield "rows to the own device stay exact; in evaluation and generation all do, unless model.condensation.in_eval"


def _table(part: CondensedPart) -> Table:
    """A row a way; figures that no way has are left out."""
    ways = part.ways
    columns = [Column("", [one.name for one in ways])]
    figures: tuple[tuple[str, Callable[[WayRecord], str | None]], ...] = (
        ("rows saved", lambda one: percent(one.rows_saved, 1)),
        ("bits per token", lambda one: None if one.bits is None else f"{_bits(one.bits)} ({_interval(one.bits)})"),
        ("layer error", lambda one: None if one.error is None else percent(one.error.value, 1)),
        ("bytes saved", lambda one: None if one.bytes_saved is None else percent(one.bytes_saved, 1)),
        ("pairs saved", lambda one: percent(one.pairs_saved, 1)),
        ("to other nodes", lambda one: percent(one.far_saved, 1)),
    )
    for header, text in figures:
        cells = [text(one) for one in ways]
        if any(cell is not None for cell in cells):
            columns.append(Column(header, [cell or "-" for cell in cells]))
    return Table(columns, note="shares are of rows, bytes and token-expert pairs with every row travelling as it is")


def _bits(metric: Metric) -> str:
    return f"{metric.value:+.4f}"


def _interval(metric: Metric) -> str:
    return f"{metric.low:+.4f} to {metric.high:+.4f}"
