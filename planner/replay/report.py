"""Screen of `moeplan replay`, and what the screen and the page of a plan say of its replay: measured and predicted."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from ...errors import InputError
from ...runtime.plan import Plan
from ..document import Column, Section, Table, Text, to_console
from ..evaluate.metrics import COPIES, EXCHANGE, EXPERTS
from ..evaluate.price import STEP
from ..figures import TimeUnit, percent
from .result import Ran, Replayed, beside, load


def replay_report(done: Replayed, console: Console) -> None:
    """Print what every plan gains, then seconds measured and predicted, and what they lack."""
    to_console([Section("", (Text.of(*_answers(done)), *_tables(done), Text.of(*_remarks(done))))], console)


def replayed_sections(plan: Plan, path: Path) -> list[Section]:
    """The replay beside a plan, or why it is none; nothing where there is none."""
    try:
        saved = load(plan, path)
    except InputError as error:
        return [Section("Replayed", (Text.of(str(error)),))]
    if saved is None:
        return []
    machine, done = saved.environment, saved.replayed
    where = (
        f"{beside(path)}: {saved.created_at:%Y-%m-%d}, {machine.num_ranks} ranks on {machine.num_hosts} host(s) of"
        f" {machine.device}, {machine.backend}, torch {machine.torch}; trace {saved.trace.path}"
    )
    return [Section("Replayed", (Text.of(*_answers(done)), *_tables(done), Text.of(*_remarks(done), where)))]


def _answers(done: Replayed) -> Iterator[str]:
    for way in done.ways[1:]:
        steps = [one.predicted[STEP].value for one in (way, done.ways[0]) if STEP in one.predicted]
        predicted = f"; predicted {_share(1 - steps[0] / steps[1])}" if len(steps) == 2 else ""
        gain = f"{_share(way.gain.value)} of the step ({_share(way.gain.high)} to {_share(way.gain.low)}{predicted})"
        noise = f"{percent(done.noise, 1)}{', a NOISY machine' * done.noisy}"
        yield f"replayed here, {way.name}: {gain} in the median round: {done.verdict(way)} {noise}"


def _share(gain: float) -> str:
    return f"{-100 * gain:+.1f} %"


def _tables(done: Replayed) -> Iterator[Table]:
    """Seconds of the step and of its parts, and copies, measured and predicted; of several steps, step by step, too."""
    unit = TimeUnit.up_to(max(way.step.value for way in done.ways))
    names = "forward and backward" if done.backward else "forward"
    yield Table(
        [
            Column(f"{names}, {unit.name}", [way.name for way in done.ways]),
            Column("step", [unit.text(way.step.value) for way in done.ways]),
            Column("95 %", [f"{unit.text(way.step.low)} to {unit.text(way.step.high)}" for way in done.ways]),
            *_predicted(done, STEP, unit),
            Column("exchange", [unit.text(way.exchange_s) for way in done.ways]),
            *_predicted(done, EXCHANGE, unit),
            Column("experts", [unit.text(way.experts_s) for way in done.ways]),
            *_predicted(done, EXPERTS, unit),
            Column("copies", [f"{way.copies:,.0f}" for way in done.ways]),
            *_predicted(done, COPIES),
        ],
        whole=True,
    )
    if done.num_steps > 1:
        columns = [Column("step", [str(step) for step in done.steps])]
        for way in done.ways:
            columns.append(Column(way.name, [unit.text(one) for one in way.measured_s]))
            if way.predicted_s:
                columns.append(Column("predicted", [unit.text(one) for one in way.predicted_s]))
        yield Table(columns, whole=True)


def _predicted(done: Replayed, metric: str, unit: TimeUnit | None = None) -> Iterator[Column]:
    """The column of a prediction, where it is known of some way."""

    def shown(way: Ran) -> str:
        if metric not in way.predicted:
            return "-"
        value = way.predicted[metric].value
        return f"{value:,.0f}" if unit is None else unit.text(value)

    if any(metric in way.predicted for way in done.ways):
        yield Column("predicted", [shown(way) for way in done.ways])


def _remarks(done: Replayed) -> Iterator[str]:
    fitted = "that plans were fitted to, as there are no others" if done.seen else "that no plan was fitted to"
    steps = "a step" if done.num_steps == 1 else f"{done.num_steps} steps"
    yield (
        f"{steps} of {done.num_tokens:,} tokens {fitted}; random weights, attention left out; copies: hidden vectors"
        " sent to other devices in a step"
    )
    yield (
        "exchange and experts are timed alone, after a barrier each; in a step they may overlap, and ranks wait; the"
        " rest of a step: counts, K and V, the way home, sums of replicas"
    )
    yield from done.doubts
