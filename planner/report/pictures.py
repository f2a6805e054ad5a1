"""Pictures of contenders on a page: loads of devices, seconds of a step.

Legend: B steps; L MoE layers; D devices.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...runtime.plan import Contender, Part
from ...solvers.arrays import Floats
from ..document import Column, Section, Table, Text
from ..evaluate.metrics import BALANCE, METRICS
from ..evaluate.price import IDEAL, PASSES, SOURCES, STEP, UNCUT
from ..evaluate.sums import device_ratios
from ..evaluate.tally import Tally
from ..figures import OF_IDEAL, TimeUnit, contender_of, figure_of, named
from ..picture import (
    BLUE,
    CYAN,
    GREEN,
    GREY,
    OCHRE,
    ORANGE,
    RED,
    VIOLET,
    Axis,
    Bar,
    Bars,
    Line,
    Plot,
    ordinals,
)

MOST_LINES, MOST_BARS = 4, 9
MOST_DOTS, MAX_DOTS = 64, 40_000  # of a layer, of more devices these quantiles; of all strips together
BINS = 40
QUANTILES = (50, 95, 99)
PUBLISHED = "eplb"  # the contender that stands beside others where there is room for few
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, CYAN, OCHRE)  # of all but today, which is grey
# Parts of a step by their colours; passes stand in place of dispatch, experts and combine. No step has a way home and
# sums: tokens that live elsewhere are not trained. None has K and V and folding: rows that stand for others return.
_COLOURS = (OCHRE, VIOLET, GREY, VIOLET, ORANGE, BLUE, GREEN, CYAN, CYAN, RED, BLUE, GREEN)
PARTS = dict(zip((*SOURCES, *PASSES), _COLOURS, strict=True))


def load_section(part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str]) -> Section:
    """Loads of devices, layer by layer, before and after, and how uneven steps are."""
    cells, names = _cells(part, tallies, today, ours), names_of(part, today)
    means = [figure_of(contender_of(part, label), BALANCE) for label in cells]
    columns = [Column("", [*(names[label] for label in cells), "ideal"])]
    columns.append(Column("mean", [*(f"{mean:.2f}" for mean in means), "1.00"]))
    columns += [
        Column(f"p{rank}", [*(f"{np.percentile(values, rank):.2f}" for values in cells.values()), "1.00"])
        for rank in QUANTILES
    ]
    text = (
        f"Token-expert pairs of every device over the mean of its layer, on the steps that judge ({part.num_steps:,})."
        f" {_dots(tallies, today, ours)}; ticks: the busiest of each step, mean over steps. Nothing gets below 1."
    )
    pictures = [*strips(part, tallies, today, ours), histogram(part, tallies, today, ours)]
    return Section("Load of devices", (Text.of(text), *pictures, Table(columns)))


def histogram(
    part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str], *, height: float = 190.0
) -> Plot:
    """How often the busiest device has how much over the mean, in the layers of all steps."""
    cells, names, colours = _cells(part, tallies, today, ours), names_of(part, today), _colours(part, today, ours)
    last = max(float(np.percentile(values, 99.5)) for values in cells.values())
    edges = np.linspace(1, max(last, 1.02), BINS + 1)
    lines = [
        Line(
            edges,
            100 * np.histogram(np.clip(cells[labels[0]], 1, edges[-1]), edges)[0] / len(cells[labels[0]]),
            ", ".join(names[label] for label in labels),
            _colour(labels, colours),
            "steps",
        )
        for labels in alike(cells)
    ]
    x = Axis("busiest device over the mean (the last bin: and more)", ends=(0.99, float(edges[-1])))
    y = Axis("% of all steps and layers", zero=True)
    return Plot("How uneven steps are", lines[::-1], x, y, rules=[(1.0, "ideal")], height=height)


def strips(
    part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str], *, height: float | None = None
) -> Iterator[Plot]:
    """Loads of devices over the mean by layer, of today and of ours on one scale."""
    share, busiest = dict[str, Floats](), dict[str, Floats]()
    names, colours, most = names_of(part, today), _colours(part, today, ours), _most_dots(tallies, today, ours)
    for label in (today, *ours):
        loads_LD = tallies[label].loads[:, :, tallies[label].slots > 0].sum(axis=0)
        share_LD = loads_LD / np.maximum(loads_LD.mean(axis=1, keepdims=True), 1e-300)
        if share_LD.shape[1] > most:
            share_LD = np.quantile(share_LD, np.linspace(0, 1, most), axis=1).T
        ratio_BL = device_ratios(tallies[label])
        share[label] = share_LD
        busiest[label] = ratio_BL.sum(axis=0) / np.maximum((ratio_BL > 0).sum(axis=0), 1)
    every = np.concatenate([one.ravel() for one in (*share.values(), *busiest.values())])
    x = Axis("load over the mean of devices", ends=(min(float(every.min()), 1.0), float(every.max()) * 1.01))
    for labels in alike({name: np.column_stack([share[name], busiest[name]]) for name in share}):
        share_LD, layers_L = share[labels[0]], np.arange(len(share[labels[0]]))
        ends_L3 = np.stack([share_LD.min(axis=1), share_LD.max(axis=1), np.full(len(share_LD), np.nan)], axis=1)
        colour = _colour(labels, colours)
        lines = [
            Line(ends_L3.ravel(), np.repeat(layers_L, 3), "", colour, "faint"),
            Line(share_LD.ravel(), np.repeat(layers_L, share_LD.shape[1]), "", colour, "dots"),
            Line(busiest[labels[0]], layers_L, "", RED, "ticks"),
        ]
        ticks = [*ordinals(len(layers_L))]
        y = Axis("MoE layer", ends=(-0.6, len(layers_L) - 0.4), ticks=ticks, falling=True)
        high = height or min(max(11.0 * len(layers_L), 80), 480)
        balance = figure_of(contender_of(part, labels[0]), BALANCE)
        title = f"{', '.join(names[label] for label in labels)}: balance {balance:.2f}"
        yield Plot(title, lines, x, y, rules=[(1.0, "even")], height=high)


def time_section(part: Part, today: str, *, whole: bool) -> Section | None:
    """Seconds of a step of contenders, part by part, and the percent of the ideal where layers are `whole`.

    The first ones and today; a line says how many more there are.
    """
    timed, base = [one for one in part.contenders if STEP in one.metrics], contender_of(part, today)
    if base not in timed:
        return None
    rows = timed[:MOST_BARS] + [base] * (base not in timed[:MOST_BARS])
    unit = TimeUnit.up_to(max(figure_of(one, STEP) for one in rows))
    ideal = figure_of(base, IDEAL) if whole and IDEAL in base.metrics else None
    bars = [_bar(one, named(one, part, today), unit, ideal) for one in rows]
    if ideal is not None:
        even = (ideal * unit.per_s, GREY, "today's step under even loads")
        bars.append(Bar.stacked("ideal: even loads", [even], f"{unit.text(ideal)} {unit.name}"))
    used = dict.fromkeys(name for one in rows for name in _parts(one))
    legend = [(METRICS[name].column, PARTS[name]) for name in used]
    picture = Bars("", bars, Axis(f"{unit.name} per step"), legend)
    more = len(timed) - len(rows)
    lines = [OF_IDEAL] * (ideal is not None) + [f"{more} more: in the tables"] * (more > 0)
    return Section("Where the time goes", (*([Text.of(*lines)] if lines else []), picture))


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


def _cells(part: Part, tallies: Mapping[str, Tally], today: str, ours: Sequence[str]) -> dict[str, Floats]:
    """Busiest device over the mean in the layers of all steps: ours, today, then published EPLB and others, a few."""
    few = [*ours, today, *_others(part, today, ours)][: max(MOST_LINES, len(ours) + 1)]
    ratios = {label: device_ratios(tallies[label]) for label in few}
    return {label: ratio_BL[ratio_BL > 0] for label, ratio_BL in ratios.items()}


def _others(part: Part, today: str, ours: Sequence[str]) -> list[str]:
    """Labels of the other contenders, published EPLB first."""
    others = [one.label for one in part.contenders if one.label not in (today, *ours)]
    return sorted(others, key=lambda label: not label.startswith(f"{PUBLISHED}/"))


def _colours(part: Part, today: str, ours: Sequence[str]) -> dict[str, int]:
    """Colours of contenders by label, the same in every picture: today grey, and none but today."""
    labels = [label for label in (*ours, *_others(part, today, ours)) if label != today]
    return {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)} | {today: GREY}


def _colour(labels: Sequence[str], colours: Mapping[str, int]) -> int:
    """The colour of contenders that are drawn as one: today's where it is among them."""
    return GREY if GREY in (every := [colours[label] for label in labels]) else every[0]


def _most_dots(tallies: Mapping[str, Tally], today: str, ours: Sequence[str]) -> int:
    """Dots of a layer, fewer the more strips and layers there are."""
    rows = len({today, *ours}) * tallies[today].loads.shape[1]
    return int(np.clip(MAX_DOTS // rows, 8, MOST_DOTS))


def _dots(tallies: Mapping[str, Tally], today: str, ours: Sequence[str]) -> str:
    """What a dot of a strip is: a device, or of many a quantile."""
    devices, most = max(int((tallies[one].slots > 0).sum()) for one in (today, *ours)), _most_dots(tallies, today, ours)
    return f"Dots: {f'{most} quantiles of {devices} devices' if devices > most else 'devices'}, all steps together"


def names_of(part: Part, today: str) -> dict[str, str]:
    """The names of contenders, by label."""
    return {one.label: named(one, part, today) for one in part.contenders}


def alike(tables: Mapping[str, Floats]) -> list[list[str]]:
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
