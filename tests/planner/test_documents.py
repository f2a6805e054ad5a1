"""Documents: what a narrow screen shows of a table, how answers are worded, and that any plan fits a page."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeplan.planner
from moeplan.planner.cli.screen import HangingConsole
from moeplan.planner.document import GAP, Column, Section, Table, Text, to_console
from moeplan.planner.evaluate.metrics import METRICS
from moeplan.planner.figures import TimeUnit, megabytes
from moeplan.planner.report.answer import gain_words
from moeplan.planner.report.plan import show_report
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.plan import Contender, Metric, Part, Verdict
from moeplan.traces.reader import Trace

COLUMNS = st.lists(st.integers(1, 12), min_size=2, max_size=12).map(
    lambda widths: [Column(f"{number}".ljust(width, "x"), ["y"]) for number, width in enumerate(widths)]
)


@given(COLUMNS, st.integers(1, 80))
def test_a_narrow_screen_shows_the_first_columns_that_fit_or_all_in_several_tables(
    columns: list[Column], width: int
) -> None:
    for whole in (False, True):
        tables = Table(columns, whole=whole).fitting(width)
        assert all(table.columns[0] == columns[0] for table in tables)
        shown = [column for table in tables for column in table.columns[1:]]
        assert shown == columns[1 : 1 + len(shown)]
        assert len(shown) == len(columns) - 1 or (not whole and len(tables) == 1)
        for table in tables:
            taken = sum(column.width for column in table.columns) + GAP * (len(table.columns) - 1)
            assert taken <= width or len(table.columns) == 2
        if not whole and len(shown) < len(columns) - 1:
            more = columns[1 + len(shown)].width
            assert sum(column.width + GAP for column in (columns[0], *shown)) + more > width


def test_details_are_printed_only_when_asked_for() -> None:
    sections = [Section("Answer", (Text.of("yes"),)), Section("Why", (Text.of("because"),), verbose=True)]
    shown = {}
    for verbose in (False, True):
        console = HangingConsole(80)
        with console.capture() as captured:
            to_console(sections, console, verbose=verbose)
        shown[verbose] = captured.get()
    assert shown == {False: "yes\n", True: "yes\n\nWhy\nbecause\n"}


def part(metric: str, ours: float, theirs: float) -> Part:
    rows = [("plan", "standard", ours), ("contiguous", "standard", theirs)]
    contenders = tuple(
        Contender(name=name, dispatch_model="standard", metrics={metric: Metric(value=figure)})
        for name, _, figure in rows
    )
    return Part(num_samples=9, num_tokens=90, num_steps=3, dropped_samples=0, contenders=contenders)


@pytest.mark.parametrize(
    ("metric", "ours", "theirs", "ends", "words"),
    [
        (
            "step_s",
            0.0311,
            0.041,
            (0.0078, 0.0119),
            "24.1 % less time per step than today (31.1 ms against 41.0 ms; 95 %: 19.0 to 29.0 %)",
        ),
        (
            "device_copies",
            3.0,
            2.0,
            (-1.2, -0.8),
            "50.0 % more copies than today (3.00 against 2.00; 95 %: 40.0 to 60.0 %)",
        ),
        (
            "balance",
            1.5,
            1.2,
            (-0.6, 0.12),
            "25.0 % more load on the busiest device than today (1.50 against 1.20; 95 %: -10.0 to 50.0 %)",
        ),
        (
            "inter_bytes",
            1e6,
            4e6,
            (None, None),
            "75.0 % fewer bytes between nodes than today (1 MB against 4 MB; no interval)",
        ),
        ("device_copies", 2.0, 2.0, (-0.1, 0.1), "no fewer copies than today (2.00 against 2.00)"),
    ],
)
def test_a_gain_is_told_in_percent_of_today_and_in_its_unit(
    metric: str, ours: float, theirs: float, ends: tuple[float | None, float | None], words: str
) -> None:
    gain = Metric(value=theirs - ours, low=ends[0], high=ends[1])
    verdict = Verdict(value="none", metric=metric, against="contiguous/standard", gain=gain, at_least=0.0)
    assert gain_words(verdict, part(metric, ours, theirs)) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(99.94e-3, "99.9 ms"), (99.96e-3, "100 ms"), (9.9996, "10,000 ms"), (10.0, "10.0 s"), (9.9951e-6, "10.0 us")],
)
def test_seconds_have_three_digits_and_no_bare_point(seconds: float, words: str) -> None:
    assert TimeUnit.worded(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"), [(999.4e6, "999"), (999.6e6, "1,000"), (1.2345e9, "1,234"), (2e3, "0.002")]
)
def test_megabytes_are_never_written_with_an_exponent(number: float, words: str) -> None:
    assert megabytes(number) == words


def test_every_metric_has_words_of_its_own_for_sentences_and_for_docs() -> None:
    assert all(spec.name == name and spec.noun and spec.meaning and spec.needs for name, spec in METRICS.items())
    assert len({spec.meaning for spec in METRICS.values()}) == len(METRICS)
    headlines = [spec.headline for spec in METRICS.values() if spec.headline is not None]
    assert len(set(headlines)) == len(headlines)


def test_a_plan_of_58_layers_fits_a_page(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(layers=58, experts=64, top_k=8, samples=40)
    plan = solve(Request.of(strategy="contiguous", trace=str(trace.path), cluster=Cluster.parse("2x8")))
    console = HangingConsole(80)
    with console.capture() as captured:
        show_report(plan, Path("plan.json"), console)
    assert captured.get().count("\n") <= 24


def test_metrics_are_named_by_their_rows_alone() -> None:
    """But where they are counted and priced; solvers' objectives, and a plan's keys, may be called alike."""
    planner = Path(moeplan.planner.__file__).parent
    alike = {"balance", "exchange_s", "hops_kept", "moe_s"}
    aside = {"certify/naive.py", "options.py"}
    for path in planner.rglob("*.py"):
        name = path.relative_to(planner).as_posix()
        if name not in aside and not name.startswith("evaluate/"):
            values = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not values & (METRICS.keys() - alike), name
