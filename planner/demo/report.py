"""Final report of `moeplan demo`: the runs beside their prediction."""

from typing import TYPE_CHECKING

from ...runtime.plan import Metric
from .job import Demo
from .run import Measured

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["demo_report"]


def demo_report(demo: Demo, console: "Console") -> None:
    """Outputs against the single process, copies and bytes before and after, the price, and where the files are."""
    console.print(
        f"\nran       the model on {demo.plan.cluster.num_devices} processes, on {demo.num_samples} other samples"
        f" ({demo.num_tokens:,} tokens)\n"
    )
    console.print(_table(demo))
    worst = max(run.largest_difference for run in demo.runs)
    misrouted = sum(run.misrouted for run in demo.runs)
    console.print(
        f"\nagainst the single process: largest difference of any logit {worst:.1e}, {misrouted} expert choices differ"
    )
    console.print(
        "predicted: copies on held-out samples of the recorded text; replayed: on the very text that ran, which must"
        " equal what was measured; balance: over the whole run as one step"
    )
    for line in (*_coherent_lines(demo), *_standard_lines(demo)):
        console.print(line)
    _print_seconds(demo, console)
    console.print(f"files     {demo.folder}: profile.json, traces/, plan.json, .moeplan/active.json, other-traces/")


def _table(demo: Demo) -> "Table":
    from rich.table import Table

    table = Table("measured", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in ("copies", "replayed", "predicted", "MB crossed", "K/V MB", "balance"):
        table.add_column(header, justify="right")
    for run, replayed in zip(demo.runs, demo.replayed, strict=True):
        predicted = _predicted(demo, run)
        table.add_row(
            f"{run.name}, {run.dispatch_model}",
            f"{run.copies:.3f}",
            f"{replayed.copies:.3f}",
            "-" if predicted is None else f"{predicted.value:.3f}",
            f"{run.payload_bytes / 1e6:.1f}",
            f"{run.kv_bytes / 1e6:.1f}" if run.kv_bytes else "-",
            f"{run.balance:.2f}",
        )
    return table


def _print_seconds(demo: Demo, console: "Console") -> None:
    """Predicted and measured milliseconds of the exchanges and the experts of a forward."""
    from rich.table import Table

    table = Table("ms a forward", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for header in ("exchange", "predicted", "ratio", "experts", "predicted", "ratio"):
        table.add_column(header, justify="right")
    pairs = []
    for run, replayed in zip(demo.runs, demo.replayed, strict=True):
        both = [(run.exchange_s, replayed.exchange), (run.experts_s, replayed.experts)]
        pairs += [(seconds, foretold) for seconds, foretold in both if foretold is not None]
        table.add_row(f"{run.name}, {run.dispatch_model}", *(cell for pair in both for cell in _compared(*pair)))
    inside = sum((foretold.low or 0) <= seconds <= (foretold.high or 0) for seconds, foretold in pairs)
    console.print()
    console.print(table)
    console.print(
        "exchange: dispatch and combine of hidden vectors (ids, weights and split sizes travel apart); experts: each"
        " layer's slowest rank; median of some forwards. ratio: predicted over measured;"
        f" {inside} of {len(pairs)} measured lie within the fit's interval\n"
    )


def _compared(seconds: float, foretold: Metric | None) -> tuple[str, str, str]:
    if foretold is None:
        return f"{seconds * 1e3:.2f}", "-", "-"
    return f"{seconds * 1e3:.2f}", f"{foretold.value * 1e3:.2f}", f"{foretold.value / seconds:.2f}"


def _predicted(demo: Demo, run: Measured) -> Metric | None:
    """The copies that the plan's held-out evaluation foresaw for such a run."""
    assert demo.plan.evaluation is not None
    part = demo.plan.evaluation.judging
    found = {contender.label: contender for contender in part.contenders}.get(f"{run.name}/{run.dispatch_model}")
    return None if found is None else found.metrics["device_copies"]


def _coherent_lines(demo: Demo) -> list[str]:
    before, after, *_ = demo.runs
    total = after.payload_bytes + after.kv_bytes + after.return_bytes
    standard = {run.name: f"{run.payload_bytes / 1e6:.1f} MB" for run in demo.runs if run.dispatch_model == "standard"}
    return [
        f"coherent: the plan moves {before.payload_bytes / 1e6:.1f} -> {after.payload_bytes / 1e6:.1f} MB of hidden"
        f" vectors ({1 - after.payload_bytes / before.payload_bytes:.0%} less); gathering K and V costs"
        f" {after.kv_bytes / 1e6:.1f} MB and going home at the end {after.return_bytes / 1e6:.1f} MB:"
        f" {total / 1e6:.1f} MB in all, against {standard['contiguous']} of contiguous and {standard['plan']} of the"
        " plan in standard"
    ]


def _standard_lines(demo: Demo) -> list[str]:
    *_, before, after = demo.runs
    change = 1 - after.copies / before.copies
    word = f"{change:.1%} fewer" if change > 0 else f"{-change:.1%} more"
    return [
        "standard: tokens return home after every layer, so keeping hops saves nothing here; what is left is"
        f" co-activation: {word} copies ({before.copies / 2:.2f} -> {after.copies / 2:.2f} distinct remote devices a"
        f" token and layer), balance {before.balance:.2f} -> {after.balance:.2f}"
    ]
