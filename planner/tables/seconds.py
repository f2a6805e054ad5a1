"""What `solve` and `show` print of a plan's predicted seconds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.plan import Metric, Part, Plan
from ..options import SecondsOptions, parsed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["TimeUnit", "print_seconds", "print_seconds_table"]

PARTS = (
    ("attention", "attention_s"),
    ("K/V", "kv_s"),
    ("dispatch", "dispatch_s"),
    ("experts", "experts_s"),
    ("combine", "combine_s"),
    ("MoE", "moe_s"),
    ("backward", "moe_backward_s"),
)
CLASSES = tuple(
    (f"{word} {link}", f"{part}_{link}_s")
    for word, part in (("K/V", "kv"), ("dispatch", "dispatch"), ("combine", "combine"))
    for link in ("intra", "inter")
)


def print_seconds(plan: Plan, part: Part, console: "Console") -> None:
    """The parts of a step of every contender in milliseconds, by link class where there are two, and their origin."""
    if "seconds" not in plan.options:
        return
    options = parsed(SecondsOptions, dict(plan.options["seconds"]), "seconds")
    brief = plan.judges_pipeline  # all contenders are of one dispatch model, and no other table is shown
    held_out = plan.evaluation is not None and part is plan.evaluation.held_out
    title = f"{'held out' if held_out else 'fitted'}, {{unit}}" if brief else "{unit} a step"
    print_seconds_table(part, console, title=title, brief=brief)
    if plan.cluster.num_nodes > 1 and _timed(part, CLASSES):
        console.print()
        console.print(_table("of these, by link", part, CLASSES, step=False, brief=brief))
    for line in _origins(plan, part, options):
        console.print(line)


def print_seconds_table(part: Part, console: "Console", *, title: str = "{unit} a step", brief: bool = False) -> None:
    """The parts of a step of every contender, where any is timed; `brief` names no dispatch models."""
    if _timed(part, PARTS):
        step = any("step_s" in contender.metrics for contender in part.contenders)
        console.print(_table(title, part, PARTS, step=step, brief=brief))


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit in which seconds are shown, so that the longest has one to five digits."""

    name: str
    per_s: float

    @classmethod
    def of(cls, part: Part) -> "TimeUnit":
        """That of the longest figure of a part of the evaluation."""
        return cls.up_to(
            max(found.value for one in part.contenders for name, found in one.metrics.items() if name.endswith("_s"))
        )

    @classmethod
    def up_to(cls, longest: float) -> "TimeUnit":
        """That of figures of which one of so many seconds is the longest."""
        if longest >= 10:
            return cls("s", 1.0)
        return cls("ms", 1e3) if longest >= 1e-2 else cls("us", 1e6)

    @classmethod
    def worded(cls, seconds: float) -> str:
        """A single figure in the unit that suits it, with its name."""
        unit = cls.up_to(seconds)
        return f"{unit.text(seconds)} {unit.name}"

    def text(self, seconds: float) -> str:
        """A figure, three digits at least."""
        value = seconds * self.per_s
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _timed(part: Part, columns: Sequence[tuple[str, str]]) -> bool:
    return any(name in contender.metrics for contender in part.contenders for _, name in columns)


def _table(title: str, part: Part, columns: Sequence[tuple[str, str]], *, step: bool, brief: bool) -> "Table":
    """A row a contender; where the screen is too narrow headers of two words, or names and ranges, take more lines."""
    from rich.table import Table

    unit = TimeUnit.of(part)
    shown = [column for column in columns if any(column[1] in found.metrics for found in part.contenders)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    wraps = [" " in header for header, _ in shown]
    table.add_column(title.format(unit=unit.name), overflow="fold", no_wrap=any(wraps))
    for (header, _), wrap in zip(shown, wraps, strict=True):
        table.add_column(header, justify="right", no_wrap=not wrap)
    if step:
        table.add_column("step (range)", justify="right")
    for contender in part.contenders:
        cells = [_cell(contender.metrics.get(name), unit) for _, name in shown]
        label = contender.name if brief else f"{contender.name}, {contender.dispatch_model}"
        table.add_row(label, *cells, *([_ranged(contender.metrics.get("step_s"), unit)] if step else []))
    return table


def _cell(metric: Metric | None, unit: TimeUnit) -> str:
    return "-" if metric is None else unit.text(metric.value)


def _ranged(metric: Metric | None, unit: TimeUnit) -> str:
    if metric is None or metric.low is None or metric.high is None:
        return _cell(metric, unit)
    return f"{_cell(metric, unit)} ({unit.text(metric.low)}-{unit.text(metric.high)})"


def _origins(plan: Plan, part: Part, options: SecondsOptions) -> Iterable[str]:
    """By which curves, what has none and what follows of that, and where they were stretched."""
    if options.sources:
        overlap = "no overlap" if not plan.judges_pipeline else "overlapped in MoE"
        yield (
            f"predicted: the busiest rank and port of each layer, {overlap}, mean over steps; intervals hold the fits'"
            " error and, over several steps, theirs"
        )
        yield f"timed by  {', '.join(f'{part}: {source}' for part, source in options.sources.items())}"
    if options.other_dtype:
        yield f"{' and '.join(options.other_dtype)} as measured in another dtype than the model's"
    for missing, reason in options.missing.items():
        yield f"no seconds of {missing}: {reason}"
    yield from _not_judged(plan, part)
    stretched = ", ".join(f"{name} {share:.0%}" for name, share in options.extrapolated.items())
    if stretched:
        yield f"EXTRAPOLATED beyond the sizes measured, share of layers: {stretched}"


def _not_judged(plan: Plan, part: Part) -> Iterable[str]:
    """Why the steps are there and the verdict is not on them."""
    verdict, found = plan.verdict, {contender.label: contender for contender in part.contenders}
    if verdict is None or verdict.metric == "step_s" or verdict.against not in found:
        return
    if all("step_s" in one.metrics for one in (part.contenders[0], found[verdict.against])):
        yield (
            f"judged by {verdict.metric}, not by the step: attention is not in it, and takes another time where tokens"
            " do not return home"
        )
