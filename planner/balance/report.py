"""What `solve` and `show` print and draw of replicas for balance: redundancy weighed, raw EPLB, phases exchanged."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...runtime.plan import Part, Plan
from ..balance_options import Redundancy
from ..expert_bytes import expert_bytes
from ..options import PlacementOptions, parsed
from ..pages.page import Section, write_page
from ..tables.contenders import megabytes
from ..tables.part import find, value
from ..tables.seconds import TimeUnit

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from rich.console import Console
    from rich.table import Table

__all__ = ["balance_lines", "print_redundancy", "write_redundancy"]

METRICS = {"step_s": "predicted step", "experts_s": "predicted time of experts", "balance": "balance"}


def balance_lines(plan: Plan, part: Part) -> Iterable[str]:
    """What the placement was asked to keep, EPLB raw and on this part, and plans of one phase judged on another."""
    options = _options(plan)
    if options is None:
        return
    kept = [f"device(s) {', '.join(map(str, options.dead))} dead, without experts"] if options.dead else []
    kept += [f"expert {expert} on device {device} in every layer" for expert, device in options.pins]
    kept += ["every expert group in one block of slots"] if options.groups == "whole" else []
    if kept:
        yield f"kept: {'; '.join(kept)}"
    if options.mixture:
        named = ", ".join(f"{one.path} {one.weight:.0%}" for one in options.mixture)
        yield f"figures are weighted means over traces: {named}"
    if (raw := options.raw) is not None:
        found = f"EPLB as published {raw.balance:.4f}"
        if raw.duplicates:
            found += f" with {raw.duplicates:,} experts twice on a device, which no engine should load"
        yield f"on the fitted loads together: {found}; repaired {raw.repaired:.4f}, the plan {raw.plan:.4f}"
        ours, theirs = (value(find(part, label), "balance") for label in ("plan/standard", "eplb/standard"))
        if options.method == "refined" and not options.pins and options.groups == "split" and theirs < ours:
            found = f"balance {ours:.4f}, that of repaired EPLB {theirs:.4f}"
            yield f"LESS EVEN THAN EPLB on the samples that judge: {found}; --method published gives that one"
    for swap in options.swaps:
        yield (
            f"made on {swap.made_on}, judged on {swap.judged_on}: balance {swap.balance:.3f} (made on"
            f" {swap.judged_on} {swap.own:.3f}, contiguous {swap.in_order:.3f})"
        )


def print_redundancy(plan: Plan, console: "Console") -> None:
    """The numbers of redundant experts that were weighed, as a table, and the choice."""
    options = _options(plan)
    if options is None or options.redundancy is None:
        return
    console.print(_table(options.redundancy))
    for line in _words(options.redundancy, plan):
        console.print(line)
    console.print()


def write_redundancy(plan: Plan, path: str | os.PathLike[str]) -> None:
    """The weighing as a page.

    Raises
    ------
    UsageError
        The plan weighed none, or a page of another name.
    StorageError
        It cannot be written.
    """
    options = _options(plan)
    if options is None or options.redundancy is None:
        raise UsageError(
            f"-o {path}: expected --timeline, or a plan of --redundant auto; it says where a layer's timeline goes, or"
            " how redundant experts were weighed"
        )
    if not str(path).endswith(".html"):
        raise UsageError(f"-o {path}; expected a page of how redundant experts were weighed: name it .html")
    found = options.redundancy
    title = f"{plan.model.name}: {plan.model.num_experts} experts on {plan.cluster}"
    section = Section("Redundant experts", " ".join(_words(found, plan)), _drawn(found))
    write_page(path, "How many redundant experts serve", title, [section])


def _options(plan: Plan) -> PlacementOptions | None:
    """How the placement was decided; None of a plan that was judged on something else."""
    found = plan.options.get("placement") if plan.decisions.names == ("placement",) else None
    return None if found is None else parsed(PlacementOptions, found, "placement")


def _table(found: Redundancy) -> "Table":
    from rich.table import Table

    times = [one.seconds for one in found.candidates if one.seconds is not None]
    unit = TimeUnit.up_to(max(times, default=0.0))
    sized = found.candidates[0].memory_bytes is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    headers = ["redundant", "slots a device", "balance (p95)"]
    headers += [f"{'step' if found.metric == 'step_s' else 'experts'}, {unit.name}"] if times else []
    for header in [*headers, *(["MB a device"] if sized else []), ""]:
        table.add_column(header, justify="right" if header else "left")
    for one in found.candidates:
        cells = [f"{one.redundant:,}", str(one.slots), f"{one.balance:.3f} ({one.balance_p95:.3f})"]
        cells += [] if one.seconds is None else [unit.text(one.seconds)]
        cells += [] if one.memory_bytes is None else [megabytes(one.memory_bytes)]
        table.add_row(*cells, "chosen" if one == found.chosen else "")
    return table


def _words(found: Redundancy, plan: Plan) -> Iterable[str]:
    """By what the choice was made, and what it takes."""
    part = "held-out part" if found.held_out else "fitted part, for nothing was held out"
    yield f"chosen: the fewest redundant experts with a {METRICS[found.metric]} within 2 % of the best, on the {part};"
    if found.chosen.redundant:
        yield "the baselines have as many slots;"
    one, extra = expert_bytes(plan.model), found.chosen.slots - found.candidates[0].slots
    if one is None:
        yield "what they weigh is not known: import the trace with --hidden-size, --ffn-size and --dtype-bytes"
        return
    more = extra * plan.model.num_layers * one
    yield f"{megabytes(more)} MB more on each device than the fewest slots take, an expert being {megabytes(one)} MB"


def _drawn(found: Redundancy) -> "Figure":
    import plotly.graph_objects as go

    extra = [one.redundant for one in found.candidates]
    figure = go.Figure()
    for name, values in (("balance", "balance"), ("balance, 95th percentile", "balance_p95")):
        figure.add_scatter(x=extra, y=[getattr(one, values) for one in found.candidates], name=name)
    if found.candidates[0].seconds is not None:
        times = [one.seconds for one in found.candidates]
        figure.add_scatter(x=extra, y=times, name=METRICS[found.metric], yaxis="y2", line={"dash": "dot"})
    figure.add_vline(x=found.chosen.redundant, line_dash="dash", annotation_text="chosen")
    return figure.update_layout(
        xaxis={"title": "redundant experts a layer"},
        yaxis={"title": "busiest device over the mean"},
        yaxis2={"title": "seconds a step", "overlaying": "y", "side": "right", "rangemode": "tozero"},
    )
