"""Pictures of contenders on a page: loads of devices, seconds of a step, bytes between devices.

Legend: B steps; L MoE layers; D devices.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...profilers.cluster import Cluster
from ...runtime.plan import Contender, Part
from ...solvers.arrays import Floats
from ..document import Column, Section, Table, Text
from ..evaluate.metrics import BALANCE, FAR_BYTES, METRICS, NEAR_BYTES
from ..evaluate.price import IDEAL, PASSES, SOURCES, STEP, UNCUT
from ..evaluate.sums import device_ratios
from ..evaluate.tally import Tally
from ..figures import OF_IDEAL, TimeUnit, contender_of, figure_of, megabytes, named
from ..picture import BLUE, CYAN, GREEN, GREY, OCHRE, ORANGE, RED, VIOLET, Axis, Bar, Bars, Heat, Line, Plot

MOST_LINES, MOST_BARS = 4, 9
MOST_DOTS = 64  # of a layer: of more devices these quantiles
BINS = 40
QUANTILES = (50, 95, 99)
PUBLISHED = "eplb"  # the contender that stands beside others where there is room for few
COLOURS = (BLUE, GREY, ORANGE, GREEN, VIOLET, CYAN, RED, OCHRE)
# Parts of a step by their colours.
PARTS = dict(zip((*SOURCES, *PASSES), (OCHRE, VIOLET, ORANGE, BLUE, GREEN, VIOLET, RED, BLUE, CYAN), strict=True))
PAIRS = "colour: {} per step from the row's device to the column's, dispatch and combine of all MoE layers"


def load_section(part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str]) -> Section:
    """Loads of devices, layer by layer, before and after, and how uneven steps are."""
    cells, names = _cells(part, tallies, today, ours), _names(part, today)
    means = [figure_of(contender_of(part, label), BALANCE) for label in cells]
    columns = [Column("", [*(names[label] for label in cells), "ideal"])]
    columns.append(Column("mean", [*(f"{mean:.2f}" for mean in means), "1.00"]))
    columns += [
        Column(f"p{rank}", [*(f"{np.percentile(values, rank):.2f}" for values in cells.values()), "1.00"])
        for rank in QUANTILES
    ]
    text = (
        f"Token-expert pairs of every device over the mean of its layer, on the {part.num_steps:,} step(s) that judge."
        " Dots: devices, all steps together; ticks: the busiest of each step, mean over steps. Nothing gets below 1."
    )
    pictures = [*strips(part, tallies, today, ours), histogram(part, tallies, today, ours)]
    return Section("Load of devices", (Text.of(text), *pictures, Table(columns)))


def histogram(
    part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str], *, height: float = 190.0
) -> Plot:
    """How often the busiest device has how much over the mean, in the layers of all steps."""
    cells, names = _cells(part, tallies, today, ours), _names(part, today)
    last = max(float(np.percentile(values, 99.5)) for values in cells.values())
    edges = np.linspace(1, max(last, 1.02), BINS + 1)
    lines = [
        Line(
            edges[:-1],
            100 * np.histogram(np.minimum(cells[label], edges[-1]), edges)[0] / len(cells[label]),
            ", ".join(names[one] for one in (label, *others)),
            COLOURS[[*cells].index(label) % len(COLOURS)],
            "steps",
        )
        for label, *others in _alike(cells)
    ]
    x = Axis("busiest device over the mean", ends=(0.99, float(edges[-1])))
    y = Axis("% of all steps and layers", zero=True)
    return Plot("How uneven steps are", lines[::-1], x, y, rules=[(1.0, "ideal")], height=height)


def strips(
    part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str], *, height: float | None = None
) -> Iterator[Plot]:
    """Loads of devices over the mean by layer, of today and of ours on one scale."""
    share, busiest, names = dict[str, Floats](), dict[str, Floats](), _names(part, today)
    for label in (today, *ours):
        loads_LD = tallies[label].loads[:, :, tallies[label].slots > 0].sum(axis=0)
        share_LD = loads_LD / np.maximum(loads_LD.mean(axis=1, keepdims=True), 1e-300)
        if share_LD.shape[1] > MOST_DOTS:
            share_LD = np.quantile(share_LD, np.linspace(0, 1, MOST_DOTS), axis=1).T
        ratio_BL = device_ratios(tallies[label])
        share[label] = share_LD
        busiest[label] = ratio_BL.sum(axis=0) / np.maximum((ratio_BL > 0).sum(axis=0), 1)
    every = np.concatenate([one.ravel() for one in (*share.values(), *busiest.values())])
    x = Axis("load over the mean of devices", ends=(min(float(every.min()), 1.0), float(every.max()) * 1.01))
    for number, labels in enumerate(_alike({name: np.column_stack([share[name], busiest[name]]) for name in share})):
        share_LD, layers_L = share[labels[0]], np.arange(len(share[labels[0]]))
        ends_L3 = np.stack([share_LD.min(axis=1), share_LD.max(axis=1), np.full(len(share_LD), np.nan)], axis=1)
        colour = COLOURS[(number - 1) % len(COLOURS)] if number else GREY
        lines = [
            Line(ends_L3.ravel(), np.repeat(layers_L, 3), "", colour, "faint"),
            Line(share_LD.ravel(), np.repeat(layers_L, share_LD.shape[1]), "", colour, "dots"),
            Line(busiest[labels[0]], layers_L, "", RED, "ticks"),
        ]
        y = Axis("MoE layer", ends=(-0.6, len(layers_L) - 0.4), falling=True)
        high = height or min(max(11.0 * len(layers_L), 80), 480)
        balance = figure_of(contender_of(part, labels[0]), BALANCE)
        title = f"{', '.join(names[label] for label in labels)}: balance {balance:.2f}"
        yield Plot(title, lines, x, y, rules=[(1.0, "even")], height=high)


def time_section(part: Part, today: str, *, whole: bool) -> Section | None:
    """Seconds of a step of every contender, part by part, and the percent of the ideal where layers are `whole`."""
    rows = [one for one in part.contenders if STEP in one.metrics][:MOST_BARS]
    if not rows or today not in {one.label for one in rows}:
        return None
    base = contender_of(part, today)
    unit = TimeUnit.up_to(max(figure_of(one, STEP) for one in rows))
    ideal = figure_of(base, IDEAL) if whole and IDEAL in base.metrics else None
    bars = [_bar(one, named(one, part, today), unit, ideal) for one in rows]
    if ideal is not None:
        even = (ideal * unit.per_s, GREY, "today's step under even loads")
        bars.append(Bar.stacked("ideal: even loads", [even], f"{unit.text(ideal)} {unit.name}"))
    used = dict.fromkeys(name for one in rows for name in _parts(one))
    legend = [(METRICS[name].column, PARTS[name]) for name in used]
    picture = Bars("", bars, Axis(f"{unit.name} per step"), legend)
    return Section("Where the time goes", (*([Text.of(OF_IDEAL)] if ideal else []), picture))


def _parts(contender: Contender) -> list[str]:
    """The parts that a contender's step is the sum of; of a step in chunks its passes."""
    names = (*UNCUT, *PASSES) if any(name in contender.metrics for name in PASSES) else SOURCES
    return [name for name in names if name in contender.metrics and figure_of(contender, name)]


def _bar(one: Contender, name: str, unit: TimeUnit, ideal: float | None) -> Bar:
    parts = [(figure_of(one, part), PARTS[part], METRICS[part].column) for part in _parts(one)]
    step = figure_of(one, STEP)
    end = f"{unit.text(step)} {unit.name}" + ("" if ideal is None else f", {100 * ideal / step:.0f} % of ideal")
    spans = [
        (seconds * unit.per_s, colour, f"{words} {unit.text(seconds)} {unit.name}") for seconds, colour, words in parts
    ]
    return Bar.stacked(name, spans, end)


def traffic_section(
    part: Part, tallies: Mapping[str, Tally], labels: Sequence[str], today: str, cluster: Cluster
) -> Section | None:
    """Bytes between all pairs of devices, or copies where sizes are unknown, of every label in one colour scale.

    Totals inside nodes and between them are the evaluation's, of all tokens; who sends whom is that of complete steps.
    """
    shown, names = dict[str, Floats](), _names(part, today)
    sized = all(FAR_BYTES in contender_of(part, label).metrics for label in labels)
    node_D = np.arange(cluster.num_devices) // cluster.devices_per_node
    far_DD = node_D[:, None] != node_D
    for label in labels:
        copies_DD = tallies[label].between_per_step
        if copies_DD is None:
            return None
        shown[label] = copies_DD
        if sized:
            far, near = (figure_of(contender_of(part, label), name) for name in (FAR_BYTES, NEAR_BYTES))
            each_DD = np.where(far_DD, far / max(copies_DD[far_DD].sum(), 1), near / max(copies_DD[~far_DD].sum(), 1))
            shown[label] = copies_DD * each_DD
    unit, text = ("MB", megabytes) if sized else ("copies", "{:,.0f}".format)
    busiest = [(one, np.unravel_index(int(one.argmax()), one.shape)) for one in shown.values()]
    columns = [
        Column("", [names[label] for label in shown]),
        Column(f"{unit} per step", [text(float(one.sum())) for one in shown.values()]),
        Column("between nodes", [text(float(one[far_DD].sum())) for one in shown.values()]),
        Column("most", [f"{text(float(one.max()))}, {a} to {b}" for one, (a, b) in busiest]),
    ]
    borders = range(cluster.devices_per_node, cluster.num_devices, cluster.devices_per_node)
    scale, top = (1e6 if sized else 1.0), max(float(one.max()) for one in shown.values())
    x, y, label = Axis("to device"), Axis("from device"), f"{unit} per step"
    heats = [
        Heat(", ".join(names[one] for one in alike), shown[alike[0]] / scale, top / scale, x, y, label, borders)
        for alike in _alike(shown)
    ]
    about = Text.of(PAIRS.format(unit))
    return Section(f"{'Bytes' if sized else 'Copies'} between devices", (about, *heats, Table(columns)))


def _cells(part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str]) -> dict[str, Floats]:
    """Busiest device over the mean in the layers of all steps: ours, today, then published EPLB and others, a few."""
    others = [one.label for one in part.contenders if one.label not in (today, *ours)]
    others.sort(key=lambda label: not label.startswith(f"{PUBLISHED}/"))
    few = [*ours, today, *others][: max(MOST_LINES, len(ours) + 1)]
    ratios = {label: device_ratios(tallies[label]) for label in few}
    return {label: ratio_BL[ratio_BL > 0] for label, ratio_BL in ratios.items()}


def _names(part: Part, today: str) -> dict[str, str]:
    """Names of contenders by label."""
    return {one.label: named(one, part, today) for one in part.contenders}


def _alike(tables: Mapping[str, Floats]) -> list[list[str]]:
    """Labels of equal tables together, in the order of the first of each."""
    groups = list[list[str]]()
    for label, table in tables.items():
        for group in groups:
            if np.array_equal(table, tables[group[0]]):
                group.append(label)
                break
        else:
            groups.append([label])
    return groups
