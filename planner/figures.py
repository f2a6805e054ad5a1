"""Figures of contenders as text and tables, metric by metric as `METRICS` has them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ..errors import InputError
from ..files import bounded
from ..profilers.cluster import Link
from ..runtime.plan import Contender, Metric, Part
from .document import Column, Table
from .evaluate.metrics import BALANCE, METRICS, MetricSpec
from .evaluate.price import IDEAL, STEP

OF_IDEAL = "% of ideal: seconds of today's step under even loads / the row's"  # below tables with that column
NEVER_ZERO = (STEP, IDEAL, BALANCE)  # figures that others are told as shares of


def worded(label: str) -> str:
    """A contender's label in words: its name, which may hold slashes, and its dispatch model."""
    name, _, dispatch_model = label.rpartition("/")
    return f"{name}, {dispatch_model}"


def contender_of(part: Part, label: str) -> Contender:
    """The contender of that label."""
    labelled = {contender.label: contender for contender in part.contenders}
    if label not in labelled:
        raise InputError(f"the plan's evaluation lacks {bounded(label, 80)}; re-run moeplan solve")
    return labelled[label]


def figure_of(contender: Contender, metric: str) -> float:
    """A figure that every evaluation has, above 0 where others are told as shares of it."""
    if metric not in contender.metrics:
        raise InputError(f"the plan's evaluation of {bounded(contender.name, 80)} lacks {metric}; re-run moeplan solve")
    value = contender.metrics[metric].value
    if metric in NEVER_ZERO and value <= 0:
        raise InputError(
            f"the plan's evaluation of {bounded(contender.name, 80)} has {metric} {value:g}; expected above 0: re-run"
            " moeplan solve"
        )
    return value


def named(contender: Contender, part: Part, today: str) -> str:
    """Name of a contender on screen: today's baseline, or its name, with its dispatch model where several are shown."""
    if contender.label == today:
        return "today"
    models = {contender.dispatch_model for contender in part.contenders}
    return f"{contender.name}, {contender.dispatch_model}" if len(models) > 1 else contender.name


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit in which seconds are shown, so that the longest has one to five digits."""

    name: str
    per_s: float

    @classmethod
    def up_to(cls, longest: float) -> "TimeUnit":
        """The unit to print a column in whose longest figure is so many seconds."""
        if longest >= 10:
            return cls("s", 1.0)
        return cls("ms", 1e3) if longest >= 1e-2 else cls("us", 1e6)

    @classmethod
    def worded(cls, seconds: float) -> str:
        """A single figure in the unit that suits it, with its name."""
        unit = cls.up_to(abs(seconds))
        return f"{unit.text(seconds)} {unit.name}"

    def text(self, seconds: float) -> str:
        """A figure, three digits at least."""
        number = seconds * self.per_s
        return f"{number:,.0f}" if abs(number) >= 99.95 else f"{number:#.3g}"


def shown(spec: MetricSpec, number: float) -> str:
    """A single figure of a metric, with its unit."""
    if spec.unit == "seconds":
        return TimeUnit.worded(number)
    return bytes_text(number) if spec.unit == "bytes" else _cell(spec, number)


def percent(share: float, digits: int = 0) -> str:
    """A share in percent."""
    return f"{100 * share:z.{digits}f} %"


def change_text(*gains: float) -> str:
    """Gains as changes in percent, the ends of an interval as "-9.5 to -3.1 %": savings are negative."""
    return " to ".join(f"{-100 * gain:+z.1f}" if round(1000 * gain) else "0" for gain in gains) + " %"


def link_text(link: Link) -> str:
    """GB/s of a device beside the others, latency, and how devices share the link."""
    rate = 1e-9 / link.s_per_byte
    text = f"{rate:.3g}" if rate < 999.5 else f"{rate:.0f}"
    alone = f", shared by {link.shared_by:.3g} devices" if link.shared_by > 1 else ""
    return f"{text} GB/s, {TimeUnit.worded(link.latency_s)}{alone}"


def bytes_text(number: float) -> str:
    """Bytes in MB, GB or TB, three digits."""
    if abs(number) < 999.5e6:
        return f"{number / 1e6:.3g} MB"
    each, unit = (1e9, "GB") if abs(number) < 999.5e9 else (1e12, "TB")
    return f"{f'{number / each:#.3g}'.rstrip('.')} {unit}"


def megabytes(number: float) -> str:
    """Bytes in MB, three digits or whole, for columns."""
    return f"{number / 1e6:.3g}" if number < 999.5e6 else f"{number / 1e6:,.0f}"


def spanned(metric: Metric, text: Callable[[float], str], to: str = "-") -> str:
    """A figure with its interval, where it has one."""
    if metric.low is None or metric.high is None:
        return text(metric.value)
    return f"{text(metric.value)} ({text(metric.low)}{to}{text(metric.high)})"


def contender_table(
    part: Part, metrics: Iterable[str], *, today: str = "", judged: str | None = None, ranged: bool = False
) -> Table:
    """Table of contenders by metric. Columns without figures, or of zero seconds only, are left out.

    Beside the metric that the verdict is `judged` on stands how much there is of what the label `today` has; intervals
    are shown where it is `ranged`.
    """
    columns = [Column("", [named(contender, part, today) for contender in part.contenders])]
    for name in metrics:
        spec = METRICS[name]
        values = [contender.metrics[name].value for contender in part.contenders if name in contender.metrics]
        if spec.column and values and (spec.unit != "seconds" or any(values)):
            columns.append(_column(spec, part, ranged=ranged))
            if name == judged:
                base = figure_of(contender_of(part, today), name)
                columns.append(
                    Column("% of today", [_share(contender.metrics.get(name), base) for contender in part.contenders])
                )
    return Table(columns, whole=ranged)


def headlines(part: Part, judged: str) -> list[str]:
    """The metrics of the first table: the judged one, then those that tell contenders apart, by rank."""
    ranked = sorted(METRICS.values(), key=lambda spec: -(spec.headline or 0))
    others = [spec.name for spec in ranked if spec.headline is not None and spec.name != judged]
    return [judged, *(name for name in others if _apart(part, name))]


def legend(part: Part, metrics: Iterable[str]) -> list[str]:
    """Legend of a table's columns, a line each."""
    known = {name for contender in part.contenders for name in contender.metrics}
    return [
        f"{METRICS[name].column}: {METRICS[name].meaning}" for name in metrics if name in known and METRICS[name].column
    ]


def _apart(part: Part, name: str) -> bool:
    """Check whether contenders differ in a metric."""
    values = [contender.metrics[name].value for contender in part.contenders if name in contender.metrics]
    return bool(values) and (len(values) < len(part.contenders) or max(values) > min(values))


def _column(spec: MetricSpec, part: Part, *, ranged: bool) -> Column:
    metrics = [contender.metrics.get(spec.name) for contender in part.contenders]
    header = spec.column
    text: Callable[[float], str] = partial(_cell, spec)
    if spec.unit == "seconds":
        unit = TimeUnit.up_to(max(metric.value for metric in metrics if metric is not None))
        header, text = f"{spec.column}, {unit.name}", unit.text
    cells = ["-" if metric is None else spanned(metric, text) if ranged else text(metric.value) for metric in metrics]
    if spec.tail is not None:
        tails = [contender.metrics.get(spec.tail) for contender in part.contenders]
        cells = [f"{cell} ({tail.value:.2f})" if tail else cell for cell, tail in zip(cells, tails, strict=True)]
    return Column(header, cells)


def _cell(spec: MetricSpec, number: float) -> str:
    if spec.unit == "share":
        return percent(number, 1)
    return megabytes(number) if spec.unit == "bytes" else f"{number:.2f}"


def _share(metric: Metric | None, base: float) -> str:
    return "-" if metric is None or not base else f"{100 * metric.value / base:.0f}"
