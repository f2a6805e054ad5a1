"""Screen and page of an eplb plan: replicas weighed, the placement chosen, groups and pins kept."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from ....runtime.plan import Part, Plan
from ...document import Column, Section, Table, Text
from ...evaluate.metrics import BALANCE, EXPERTS
from ...evaluate.price import STEP
from ...figures import TimeUnit, bytes_text, megabytes, percent
from ...picture import BLUE, ORANGE, Axis, Line, Plot
from ..placement_options import PlacementOptions
from .options import By, Choice, Redundancy

BY: Mapping[By, str] = {
    "published": "EPLB as published",
    "sum": "refined by all loads together",
    "steps": "refined by steps",
    "robust": "refined by steps and resampled steps",
}
WEIGHED_BY = {STEP: "predicted step", EXPERTS: "predicted time of experts", BALANCE: "balance"}


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Replicas chosen, and the dead devices, pins and groups kept."""
    options = PlacementOptions.of(plan)
    if options.redundancy is not None:
        yield from _words(options.redundancy, plan)
    kept = [f"device(s) {', '.join(map(str, options.dead))} dead, without experts"] if options.dead else []
    kept += [f"expert {expert} on device {device} in every layer" for expert, device in options.pins]
    kept += ["every expert group in one block of slots"] if options.groups == "whole" else []
    if kept:
        yield f"kept: {'; '.join(kept)}"
    if options.mixture:
        named = ", ".join(f"{one.path} {percent(one.weight)}" for one in options.mixture)
        yield f"figures are weighted means over traces: {named}"


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The placement that was chosen, and the numbers of replicas that were weighed."""
    options = PlacementOptions.of(plan)
    if options.choice is not None:
        yield Section("Placement chosen", (Text.of(_chosen(options.choice)),), verbose=True)
    if (weighed := options.redundancy) is not None:
        yield Section("Replicas weighed", (_table(weighed),), verbose=True)


def pictures(plan: Plan, folder: Path, task: object) -> Iterator[Section]:
    """The numbers of replicas that were weighed against balance and time, and the one chosen."""
    if (weighed := PlacementOptions.of(plan).redundancy) is None:
        return
    rows, x = weighed.candidates, Axis("redundant experts per layer")
    extra, chosen = [row.redundant for row in rows], [(weighed.chosen.redundant, "chosen")]
    lines = [
        Line(extra, [row.balance for row in rows], "balance", BLUE),
        Line(extra, [row.balance_p95 for row in rows], "95th percentile", ORANGE),
    ]
    drawn = list[Text | Plot]([Plot("", lines, x, Axis("busiest device over the mean"), chosen)])
    times = [row.seconds for row in rows if row.seconds is not None]
    if times:
        unit = TimeUnit.up_to(max(times))
        y = Axis(f"{WEIGHED_BY[weighed.metric]}, {unit.name}", zero=True)
        drawn.append(Plot("", [Line(extra, [unit.per_s * one for one in times])], x, y, chosen))
    if after := _paid_back(weighed, plan):
        drawn.insert(0, Text.of(_pays(weighed, after)))
        places, tokens = [*after], [*after.values()]
        paid = [Line(places, tokens), Line(places, tokens, shape="dots")]
        drawn.append(Plot("", paid, x, Axis("tokens after which replicas pay", log=True), chosen))
    yield Section("The price of replicas", drawn)


def _paid_back(weighed: Redundancy, plan: Plan) -> dict[int, float]:
    """Tokens after which numbers of redundant experts pay, those that save no time left out; empty where not known.

    Notes
    -----
    With m more bytes of experts on a device than with the fewest slots, b seconds a byte of the slowest link, and steps
    of T tokens that take s seconds less, sending the weights once takes as long as

        n = T b m / s                                                                                           (1)

    tokens save.
    """
    links, fewest = plan.cluster.links.values(), weighed.candidates[0]
    if fewest.seconds is None or fewest.memory_bytes is None or not links or plan.evaluation is None:
        return {}
    byte_s, tokens, after = max(link.s_per_byte for link in links), plan.evaluation.fit.tokens_per_step, {}
    for row in weighed.candidates[1:]:
        if row.seconds is None or row.memory_bytes is None:
            continue
        saved_s, more = fewest.seconds - row.seconds, row.memory_bytes - fewest.memory_bytes
        if saved_s > 0:
            after[row.redundant] = tokens * byte_s * more / saved_s  # (1)
    return after


def _pays(weighed: Redundancy, after: Mapping[int, float]) -> str:
    """Sentence that says after how many tokens the chosen number pays."""
    number = weighed.chosen.redundant
    if number == weighed.candidates[0].redundant:
        return f"{number:,} redundant experts are chosen, the fewest that were weighed."
    if number not in after:
        return f"{number:,} redundant experts, chosen here, save no time over the fewest that were weighed."
    return (
        f"{number:,} redundant experts pay after {after[number]:,.0f} tokens: these save the time in which the slowest"
        " link sends a device its replicas."
    )


def _table(weighed: Redundancy) -> Table:
    times = [row.seconds for row in weighed.candidates if row.seconds is not None]
    unit = TimeUnit.up_to(max(times, default=0.0))
    rows = weighed.candidates
    columns = [
        Column("replicas", [f"{row.redundant:,}{' (chosen)' if row == weighed.chosen else ''}" for row in rows]),
        Column("slots/device", [str(row.slots) for row in rows]),
        Column("balance (p95)", [f"{row.balance:.3f} ({row.balance_p95:.3f})" for row in rows]),
    ]
    if times:
        what = "step" if weighed.metric == STEP else "experts"
        columns.append(Column(f"{what}, {unit.name}", [unit.text(row.seconds or 0.0) for row in rows]))
    if rows[0].memory_bytes is not None:
        columns.append(Column("MB/device", [megabytes(row.memory_bytes or 0) for row in rows]))
    return Table(columns)


def _chosen(choice: Choice) -> str:
    """The placement chosen, and the figures that chose it."""
    if not choice.candidates:
        return f"{BY['published']}: {choice.reason}"
    ours = {row.by: row for row in choice.candidates}
    if choice.chosen == "published":
        tried = ", ".join(f"{row.balance:.4f} against {row.published:.4f} {BY[row.by]}" for row in choice.candidates)
        return f"{BY['published']}: nothing is certainly more even on parts of the fitted samples ({tried})"
    row = ours[choice.chosen]
    figures = f"{row.balance:.4f} against {row.published:.4f} of EPLB as published, certainly {row.low:.4f} less"
    return f"{BY[choice.chosen]}: on parts of the fitted samples balance is {figures}"


def _words(weighed: Redundancy, plan: Plan) -> Iterator[str]:
    """The number chosen, and the memory that the replicas take."""
    part = "fitted samples that they were not placed by" if weighed.held_out else "the one unit that was fitted"
    replicas = f"{weighed.chosen.redundant:,} replicas per layer"
    yield f"{replicas}: the fewest with a {WEIGHED_BY[weighed.metric]} within 2 % of the best, on {part}"
    each = plan.model.expert_bytes
    alive = (weighed.chosen.redundant + plan.model.num_experts) // weighed.chosen.slots
    more = (weighed.chosen.slots - -(-plan.model.num_experts // alive)) * plan.model.num_layers
    if each is None:
        yield "what they weigh is not known: import the trace with --hidden-size, --ffn-size and --dtype-bytes"
    else:
        memory = f"{bytes_text(each)} each: {bytes_text(more * each)}"
        yield f"{more:,} more experts per device than with the fewest slots, {memory}"
