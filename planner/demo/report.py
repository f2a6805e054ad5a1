"""Screen of `moeplan demo`: the answer for published hardware, then every run beside one process and its prediction."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from ...runtime.plan import Metric
from ...traces.examples import CLUSTER
from ..document import Column, Section, Table, Text, to_console
from ..evaluate.metrics import COPIES, EXCHANGE, EXPERTS, METRICS
from ..evaluate.price import STEP
from ..figures import TimeUnit
from ..report.answer import answer
from ..report.remarks import by_size
from ..strategies.auto.sections import table
from .job import Demo
from .published import EXAMPLE, LINK, PRESET

MOST_SPAN = 3.0  # of an interval, high over low: a wider one tells nothing
SAME = 1e-3  # of logits in float32


def demo_report(demo: Demo, console: Console) -> None:
    """Print both halves, the conclusion last."""
    assert demo.prefill.evaluation is not None
    assert demo.prefill.verdict is not None
    hardware = f"--preset {PRESET} --cluster {CLUSTER} --link {LINK}"
    first = Text.of(
        f"1. {EXAMPLE} on 2 nodes of 8 H200 ({hardware})",
        answer(demo.prefill),
    )
    judging = demo.prefill.evaluation.judging
    sizes = Text.of(*by_size(demo.prefill.verdict, judging), f"decode, eplb alone: {answer(demo.decode)}")
    second = Text.of(
        f"2. a small model on 4 processes of this machine, as today and under {len(demo.runs) - 1} plans:"
        f" {demo.num_samples} samples, {demo.num_tokens:,} tokens"
    )
    ranked = replace(table(demo.prefill, judging), whole=False)  # forty lines have no room for a second table
    parts = (first, ranked, sizes), (second, _runs(demo), Text.of(*_seconds(demo))), (Text.of(*_conclusion(demo)),)
    to_console([Section("", body) for body in parts], console)


def exact(demo: Demo) -> bool:
    """Check whether every run gave a single process's outputs, with the copies and bytes that were predicted."""
    same = all(run.misrouted == 0 and run.largest_difference < SAME for run in demo.runs)
    measured = [(run.copies, run.payload_bytes + run.kv_bytes) for run in demo.runs]
    return same and measured == [*zip(_copies(demo), _bytes(demo), strict=True)]


def _copies(demo: Demo) -> list[int]:
    """The copies of every run that are predicted."""
    each = demo.num_tokens * demo.runs_model.num_layers
    return [round(one.metrics[COPIES].value * each) for one in demo.replayed]


def _bytes(demo: Demo) -> list[int]:
    """The bytes of every run that are predicted: hidden vectors, K and V."""
    names = [spec.name for spec in METRICS.values() if spec.unit == "bytes"]
    return [round(sum(one.metrics[name].value for name in names if name in one.metrics)) for one in demo.replayed]


def _runs(demo: Demo) -> Table:
    """Every run beside one process, and its copies and megabytes beside those predicted."""
    sent = [run.payload_bytes + run.kv_bytes for run in demo.runs]
    columns = [
        Column("", [run.name for run in demo.runs]),
        Column("logits off by", [f"{run.largest_difference:.0e}" for run in demo.runs]),
        Column("copies", [f"{run.copies:,}" for run in demo.runs]),
        Column("predicted", [f"{one:,}" for one in _copies(demo)]),
        Column("MB, with K and V", [f"{one / 1e6:.1f}" for one in sent]),
        Column("predicted", [f"{one / 1e6:.1f}" for one in _bytes(demo)]),
        Column("exchange, ms", [f"{run.exchange_s * 1e3:.0f}" for run in demo.runs]),
        Column("experts, ms", [f"{run.experts_s * 1e3:.0f}" for run in demo.runs]),
    ]
    return Table(columns)


def _seconds(demo: Demo) -> Iterator[str]:
    """Measured over predicted seconds of exchanges and experts."""
    for name, metric, seconds in (
        ("exchange", EXCHANGE, [run.exchange_s for run in demo.runs]),
        ("experts", EXPERTS, [run.experts_s for run in demo.runs]),
    ):
        pairs = [(one, row.metrics.get(metric)) for one, row in zip(seconds, demo.replayed, strict=True)]
        ratios = ", ".join(f"{one / row.value:.2f}" for one, row in pairs if row)
        yield f"{name}, measured over predicted: {ratios}; {interval_words(pairs)}"


def interval_words(pairs: Sequence[tuple[float, Metric | None]]) -> str:
    """Number of measured seconds within the predicted intervals; useless where one spans too much."""
    known = [(seconds, one.value, one.low or 0.0, one.high or 0.0) for seconds, one in pairs if one is not None]
    if not known:
        return "not predicted"
    span = max(high / low if low else math.inf for _, _, low, high in known)
    if span > MOST_SPAN:
        return f"useless: the interval spans a factor of {span:.3g}"
    inside = sum(low <= seconds <= high for seconds, _, low, high in known)
    least, most = min(low / value for _, value, low, _ in known), max(high / value for _, value, _, high in known)
    return f"{inside} of {len(known)} within {least:.2f} to {most:.2f}, the fit's error alone"


def _conclusion(demo: Demo) -> Iterator[str]:
    if exact(demo):
        yield "The small model gave the same outputs under all plans, and every copy and byte was the one predicted."
    else:
        yield "The small model's outputs, copies or bytes differ from what was predicted: please report this."
    ours, today, *_ = demo.prefill.evaluation.judging.contenders if demo.prefill.evaluation is not None else ()
    if STEP in ours.metrics:
        times = [TimeUnit.worded(one.metrics[STEP].value) for one in (today, ours)]
        yield f"{EXAMPLE}: predicted for the hardware of 1 is a step of prefill of {times[1]}, not {times[0]}."
    yield f"files     {demo.folder}    next: moeplan solve --trace YOURS --cluster {CLUSTER}"
