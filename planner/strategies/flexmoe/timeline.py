"""The timeline of a layer whose replicas follow the load: its balance at every step under every rule, and the moves."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import UsageError
from ....runtime.plan import Plan
from ....runtime.schedule import COLUMNS, KINDS, PLAN, Schedule
from ....solvers.arrays import Floats, Ints
from ...document import Section, Text, check_page, write_page
from ...picture import BLUE, GREY, Axis, Line, Plot

BASIS = "max/mean load of its devices, on the steps that judge"
SHADES = " ▁▂▃▄▅▆▇█"
LABEL = 26
POINTS = 160  # of a line on a page
EVEN = 1.0005  # what a table prints as 1.000


def timeline_picture(plan: Plan, layer: int, width: int, folder: Path) -> Iterable[str]:
    """The timeline in characters, a row a rule and a column a few steps; UsageError for a layer that is not there."""
    schedule, balance = _of_layer(plan, layer, folder)
    columns = min(max(width - LABEL - 9, 8), len(schedule.steps))
    parts = np.array_split(np.arange(len(schedule.steps)), columns)
    worst = max(1.02, *(float(rows.max()) for rows in balance.values()))
    yield f"layer {layer}: {BASIS}, {schedule.steps[0]:,} to {schedule.steps[-1]:,}"
    each = f"{len(schedule.steps) / columns:.3g}"
    yield f"a column = {each} recorded steps; empty = 1, {SHADES[-1]} = {worst:.2f}, on a log scale"
    flat = [name for name, rows in balance.items() if rows.max() < EVEN]
    if flat:
        yield f"even at every step (below {EVEN:g}), not drawn: {', '.join(flat)}"
    for name, rows in balance.items():
        if name in flat:
            continue
        heights = [np.log(max(float(rows[part].mean()), 1.0)) / np.log(worst) for part in parts]
        marks = "".join(
            SHADES[min(int(np.ceil(height * (len(SHADES) - 1) - 0.05)), len(SHADES) - 1)] for height in heights
        )
        yield f"{name[:LABEL]:<{LABEL}} {rows.mean():.3f} |{marks}|"
    steps = schedule.operations[schedule.operations[:, 1] == layer][:, 0]
    moved = "".join("'" if np.isin(schedule.steps[part], steps).any() else " " for part in parts)
    yield f"{'changes by the plan':<{LABEL}} {len(steps):>5} |{moved}|"


def write_timeline(plan: Plan, layer: int, path: str | os.PathLike[str], folder: Path) -> None:
    """Write the timeline of a layer as a page; errors as of `timeline_picture` and `check_page`."""
    check_page(path, "; expected a page of balance over steps")
    schedule, balance = _of_layer(plan, layer, folder)
    text = (
        f"{plan.model.name}, {plan.cluster}: {BASIS}. Ticks are moves of the plan; a lower line is better, 1 the best."
    )
    changed = schedule.operations[schedule.operations[:, 1] == layer][:, 0]
    section = Section("Balance", tuple(_drawn(schedule.steps, changed, balance)))
    write_page(path, f"Layer {layer}: balance while the model trains", text, [section])


def pictures(plan: Plan, folder: Path, task: object) -> Iterator[Section]:
    """Balance over time under every rule, mean over layers, and the changes of the plan."""
    schedule = Schedule.beside(plan, folder)
    balance = {name: schedule.balance[name].mean(axis=1) for name in _names(schedule)}
    text = f"{BASIS}, mean over layers; 1 is best. One layer: moeplan show PLAN --timeline LAYER -o PAGE.html"
    drawn = _drawn(schedule.steps, schedule.operations[:, 0], balance)
    yield Section("Balance while the model trains", (Text.of(text), *drawn))


def trace_events(plan: Plan, layer: int, folder: Path) -> list[dict[str, Any]]:
    """The moves of a layer, in the order of steps."""
    schedule, _ = _of_layer(plan, layer, folder)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in schedule.operations.tolist() if row[1] == layer]
    return [row | {"kind": KINDS[row["kind"]]} for row in rows]


def _of_layer(plan: Plan, layer: int, folder: Path) -> tuple[Schedule, dict[str, Floats]]:
    """The schedule beside a plan, and the balance of a layer by rule, `[B]`."""
    schedule = Schedule.beside(plan, folder)
    if not 0 <= layer < plan.model.num_layers:
        raise UsageError(f"--timeline {layer}; expected an MoE layer, 0 to {plan.model.num_layers - 1}")
    return schedule, {name: schedule.balance[name][:, layer] for name in _names(schedule)}


def _names(schedule: Schedule) -> list[str]:
    """Contenders of a schedule, the plan first."""
    return sorted(schedule.balance, key=lambda name: (name != PLAN, name))


def _drawn(steps: Ints, changed: Ints, balance: dict[str, Floats]) -> Iterator[Plot]:
    """Balance over steps by rule, and the changes of the plan, a point for so many steps that few are left."""
    parts = np.array_split(np.arange(len(steps)), min(len(steps), POINTS))
    x, at = Axis("step of the training run"), [float(steps[part].mean()) for part in parts]
    lines = [
        Line(at, [float(rows[part].mean()) for part in parts], name, (BLUE, *range(2, 8), GREY)[min(number, 7)])
        for number, (name, rows) in enumerate(balance.items())
    ]
    yield Plot("Balance", lines, x, Axis("busiest device over the mean", log=True))
    each = [int(np.isin(changed, steps[part]).sum()) for part in parts]
    edges = [float(steps[part[0]]) for part in parts] + [float(steps[-1]) + 1]
    yield Plot("Changes by the plan", [Line(edges, each, "", BLUE, "steps")], x, Axis("moves, a point", zero=True))
