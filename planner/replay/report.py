"""Screen of `moeplan replay`: seconds measured beside those predicted."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..document import Column, Section, Table, Text, to_console
from ..evaluate.metrics import EXCHANGE, EXPERTS
from ..evaluate.price import STEP
from ..figures import TimeUnit, percent
from .job import Ran, Replayed


def replay_report(done: Replayed, console: Console) -> None:
    """Print what every plan gains, then seconds measured and predicted."""
    to_console([Section("", (Text.of(*_answers(done)), _table(done), Text.of(*_remarks(done))))], console)


def _answers(done: Replayed) -> Iterator[str]:
    for way in done.ways[1:]:
        gain = f"{way.name}: {_share(way.gain.value)} of the step ({_share(way.gain.high)} to {_share(way.gain.low)})"
        beyond = "above" if way.name in done.gaining else "not above"
        yield f"{gain}, {beyond} the noise of {percent(done.noise, 1)}"


def _share(gain: float) -> str:
    return f"{-100 * gain:+.1f} %"


def _table(done: Replayed) -> Table:
    """Seconds of the step and of its parts, measured and predicted."""
    unit = TimeUnit.up_to(max(way.step.value for way in done.ways))
    names = "forward and backward" if done.backward else "forward"
    columns = [
        Column(f"{names}, {unit.name}", [way.name for way in done.ways]),
        Column("step", [unit.text(way.step.value) for way in done.ways]),
        Column("95 %", [f"{unit.text(way.step.low)} to {unit.text(way.step.high)}" for way in done.ways]),
        Column("predicted", [_predicted(way, STEP, unit) for way in done.ways]),
        Column("exchange", [unit.text(way.exchange_s) for way in done.ways]),
        Column("predicted", [_predicted(way, EXCHANGE, unit) for way in done.ways]),
        Column("experts", [unit.text(way.experts_s) for way in done.ways]),
        Column("predicted", [_predicted(way, EXPERTS, unit) for way in done.ways]),
    ]
    return Table(columns if done.ways[0].predicted else [one for one in columns if one.header != "predicted"])


def _predicted(way: Ran, metric: str, unit: TimeUnit) -> str:
    value: Any = way.predicted.get(metric)
    return "-" if value is None else unit.text(value)


def _remarks(done: Replayed) -> Iterator[str]:
    seen = "fitted samples, as there are no others" if done.seen else "unseen samples"
    yield f"a step of {done.num_tokens:,} tokens of {done.num_samples:,} {seen}; random weights, attention left out"
    yield "exchange and experts are timed alone, after a barrier each; in a step they may overlap, and ranks wait"
    if not done.ways[0].predicted:
        yield "for predictions: moeplan profile here, then --profile profile.json"
