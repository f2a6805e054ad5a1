"""Final report of `moeplan demo`: the runs beside their prediction."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Console

from ...runtime.plan import Metric
from ..document import Column, Section, Table, Text, to_console
from ..evaluate.metrics import COPIES, EXCHANGE, EXPERTS
from .job import ROUNDS, Demo

MOST_SPAN = 3.0  # of an interval, high over low: a wider one tells nothing


def demo_report(demo: Demo, console: Console) -> None:
    """Outputs against the single process, copies and bytes before and after, the price, and where the files are."""
    ran = (
        f"ran       the model on {demo.plan.cluster.num_devices} processes, on {demo.num_samples} other samples"
        f" ({demo.num_tokens:,} tokens)"
    )
    names = "profile.json, profile-beside-run.json, traces/, plan.json, .moeplan/active.json, other-traces/"
    files = f"files     {demo.folder}: {names}"
    bodies = (Text.of(ran),), (_copies(demo),), (Text.of(*_words(demo)),), _seconds(demo), (Text.of(files),)
    console.print()
    to_console([Section("", body) for body in bodies], console)


def _copies(demo: Demo) -> Table:
    """Copies and bytes of every run, measured, replayed and predicted."""
    part = demo.plan.evaluation and demo.plan.evaluation.judging
    predicted = {one.label: one.metrics[COPIES].value for one in part.contenders} if part else {}
    labels = [f"{run.name}/{run.dispatch_model}" for run in demo.runs]
    columns = {
        "measured": _names(demo),
        "copies": [f"{run.copies:.3f}" for run in demo.runs],
        "replayed": [f"{one.metrics[COPIES].value:.3f}" for one in demo.replayed],
        "predicted": [f"{predicted[label]:.3f}" if label in predicted else "-" for label in labels],
        "MB crossed": [_megabytes(run.payload_bytes) for run in demo.runs],
        "K/V MB": [_megabytes(run.kv_bytes) if run.kv_bytes else "-" for run in demo.runs],
        "balance": [f"{run.balance:.2f}" for run in demo.runs],
    }
    return Table([Column(header, cells) for header, cells in columns.items()], whole=True)


def _seconds(demo: Demo) -> tuple[Table, Text]:
    """Predicted and measured milliseconds of the exchanges and the experts of a forward, explained."""
    exchanges = [(run.exchange_s, one.metrics.get(EXCHANGE)) for run, one in zip(demo.runs, demo.replayed, strict=True)]
    experts = [(run.experts_s, one.metrics.get(EXPERTS)) for run, one in zip(demo.runs, demo.replayed, strict=True)]
    columns = [Column("ms a forward", _names(demo))]
    for name, part in (("exchange", exchanges), ("experts", experts)):
        columns.append(Column(name, [f"{seconds * 1e3:.2f}" for seconds, _ in part]))
        columns.append(Column("predicted", [f"{one.value * 1e3:.2f}" if one else "-" for _, one in part]))
        columns.append(Column("ratio", [f"{one.value / seconds:.2f}" if one else "-" for seconds, one in part]))
    explained = (
        "exchange: a dispatch gathers rows and sends them, a combine sends partial sums and adds them up; experts: the"
        f" compute of a routed block; of each part the slowest rank, the median of {ROUNDS} forwards. predicted: from"
        " routed_exchange and routed_block as measured between these forwards; ratio: predicted over measured"
    )
    return Table(columns, whole=True), Text.of(
        explained, f"exchange: {interval_words(exchanges)}", f"experts: {interval_words(experts)}"
    )


def interval_words(pairs: Sequence[tuple[float, Metric | None]]) -> str:
    """How many measured seconds lie within the intervals of what was predicted; useless where one spans too much."""
    known = [(seconds, one.low or 0.0, one.high or 0.0) for seconds, one in pairs if one is not None]
    if not known:
        return "not predicted"
    span = max(high / low if low else math.inf for _, low, high in known)
    if span > MOST_SPAN:
        return f"useless: the interval spans a factor of {span:.3g}"
    inside = sum(low <= seconds <= high for seconds, low, high in known)
    return f"{inside} of {len(known)} measured lie within the interval"


def _words(demo: Demo) -> Iterator[str]:
    """The outputs, and what the plan moves under coherent and under standard dispatch."""
    worst, misrouted = max(run.largest_difference for run in demo.runs), sum(run.misrouted for run in demo.runs)
    yield f"against the single process: largest difference of any logit {worst:.1e}, {misrouted} expert choices differ"
    yield (
        "predicted: copies on held-out samples of the recorded text; replayed: on the very text that ran, which must"
        " equal what was measured; balance: over the whole run as one step"
    )
    before, after, base, planned = demo.runs
    total = after.payload_bytes + after.kv_bytes + after.return_bytes
    yield (
        f"coherent: the plan moves {_megabytes(before.payload_bytes)} -> {_megabytes(after.payload_bytes)} MB of hidden"
        f" vectors ({1 - after.payload_bytes / before.payload_bytes:.0%} less); gathering K and V costs"
        f" {_megabytes(after.kv_bytes)} MB and going home at the end {_megabytes(after.return_bytes)} MB:"
        f" {_megabytes(total)} MB in all, against {_megabytes(base.payload_bytes)} MB of contiguous and"
        f" {_megabytes(planned.payload_bytes)} MB of the plan in standard"
    )
    change = 1 - planned.copies / base.copies
    word = f"{change:.1%} fewer" if change > 0 else f"{-change:.1%} more"
    yield (
        "standard: tokens return home after every layer, so keeping hops saves nothing here; what is left is"
        f" co-activation: {word} copies ({base.copies / 2:.2f} -> {planned.copies / 2:.2f} distinct remote devices a"
        f" token and layer), balance {base.balance:.2f} -> {planned.balance:.2f}"
    )


def _names(demo: Demo) -> list[str]:
    return [f"{run.name}, {run.dispatch_model}" for run in demo.runs]


def _megabytes(number: int) -> str:
    return f"{number / 1e6:.1f}"
