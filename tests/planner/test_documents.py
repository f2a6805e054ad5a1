"""Documents: tables on narrow screens, how answers are worded, that any plan fits a screen; pages whole and offline."""

import ast
import base64
import math
import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

import moeplan.planner
from moeplan.errors import InputError, StorageError
from moeplan.planner.document import GAP, Column, Headline, Section, Table, Text, write_page
from moeplan.planner.evaluate.metrics import METRICS
from moeplan.planner.figures import TimeUnit, change_text, megabytes
from moeplan.planner.options import EvaluationOptions, SecondsOptions
from moeplan.planner.picture import Axis, Bar, Bars, Heat, Line, Plot
from moeplan.planner.picture.axis import short
from moeplan.planner.report.answer import _reach, answer, carried, doubt, gain_words, split_words
from moeplan.planner.report.plan import show_report
from moeplan.planner.report.remarks import by_size, doubts, scaled_up
from moeplan.planner.strategies.auto.options import AutoOptions, Tried
from moeplan.planner.strategies.auto.sections import remarks
from moeplan.runtime.exports import ENGINES
from moeplan.runtime.plan import Contender, Evaluation, Metric, Part, SizedGain, Verdict
from tests.planner.makers import edited, planned, screen

COLUMNS = st.lists(st.integers(1, 12), min_size=2, max_size=12).map(
    lambda widths: [Column(f"{number}".ljust(width, "x"), ["y"]) for number, width in enumerate(widths)]
)


@example([Column("0xxxxx", ["y"]), Column("1", ["y"]), Column("2", ["y"])], 11)  # one table, whose names wrap
@given(COLUMNS, st.integers(1, 80))
def test_a_narrow_screen_shows_the_columns_that_fit_or_all_in_several_tables(columns: list[Column], width: int) -> None:
    for whole in (False, True):
        tables = Table(columns, whole=whole).fitting(width)
        assert all(table.columns[0] == columns[0] for table in tables)
        shown = [column for table in tables for column in table.columns[1:]]
        assert shown == columns[1 : 1 + len(shown)]
        assert len(shown) == len(columns) - 1 or (not whole and len(tables) == 1)
        for table in tables:
            wraps = whole and columns[0].width + sum(GAP + column.width for column in columns[1:]) > width
            names = min(columns[0].width, width // 2) if wraps else columns[0].width
            taken = names + sum(GAP + column.width for column in table.columns[1:])
            assert taken <= width or len(table.columns) == 2
        if not whole and len(shown) < len(columns) - 1:
            more = columns[1 + len(shown)].width
            assert sum(column.width + GAP for column in (columns[0], *shown)) + more > width


def part(metric: str, ours: float, theirs: float) -> Part:
    contenders = tuple(
        Contender(name=name, dispatch_model="standard", metrics={metric: Metric(value=figure)})
        for name, figure in (("plan", ours), ("contiguous", theirs))
    )
    return Part(num_samples=9, num_tokens=90, num_steps=3, dropped_samples=0, tokens_per_step=30, contenders=contenders)


@pytest.mark.parametrize(
    ("metric", "ours", "theirs", "low", "high", "words"),
    [
        ("step_s", 0.031, 0.04, 8e-3, 0.012, "-22.5 % of the MoE step|31.0 ms against 40.0 ms|95 %: -30.0 to -20.0 %"),
        ("device_copies", 3.0, 2.0, -1.2, -0.8, "+50.0 % copies|3.00 against 2.00|95 %: +40.0 to +60.0 %"),
        ("balance", 3, 2, -1.2, 0.2, "+50.0 % load on the busiest device|3.00 against 2.00|95 %: -10.0 to +60.0 %"),
        ("inter_bytes", 1e6, 4e6, None, None, "-75.0 % bytes between nodes|1 MB against 4 MB|no interval"),
        ("device_copies", 2.0, 2.0, -0.1, 0.1, "0 % copies|2.00 against 2.00|95 %: -5.0 to +5.0 %"),
    ],
)
def test_a_gain_is_told_in_percent_of_today_and_in_its_unit(
    metric: str, ours: float, theirs: float, low: float | None, high: float | None, words: str
) -> None:
    ends = {name: end and end / theirs for name, end in (("low", low), ("high", high))}
    verdict = Verdict(
        value="none",
        metric=metric,
        against="contiguous/standard",
        at_least=0.0,
        gain=Metric(value=theirs - ours, low=low, high=high),
        share=Metric(value=1 - ours / theirs, **ends),
    )
    told = "{} ({} today; {})".format(*words.split("|"))
    assert gain_words(verdict, part(metric, ours, theirs)) == told


def test_seconds_have_three_digits_and_megabytes_never_an_exponent() -> None:
    seconds = (99.94e-3, 99.96e-3, 9.9996, 10.0, 9.9951e-6, 4.257e-3)
    assert [*map(TimeUnit.worded, seconds)] == ["99.9 ms", "100 ms", "10,000 ms", "10.0 s", "10.0 us", "4,257 us"]
    assert [*map(megabytes, (999.4e6, 999.6e6, 1.2345e9, 2e3))] == ["999", "1,000", "1,234", "0.002"]


def test_changes_are_told_to_a_tenth_of_a_percent() -> None:
    assert [*map(change_text, (0.004, -0.004, 0.0006, 0.0004, 0.0))] == ["-0.4 %", "+0.4 %", "-0.1 %", "0 %", "0 %"]


def test_a_part_that_holds_a_step_is_not_scaled_up() -> None:
    there = part("balance", 1.0, 2.0)
    sized = [there.model_copy(update={"tokens_per_step": there.num_tokens + more}) for more in (-1, 0, 1)]
    assert [*map(bool, map(scaled_up, sized))] == [False, False, True]


def test_samples_of_an_incomplete_last_step_are_not_counted_as_judged(make_trace: Any) -> None:
    plan = planned(make_trace(samples=40), "eplb", samples_per_step=8)
    judging = plan.evaluation.judging
    assert judging.num_samples == 8 * judging.num_steps + judging.dropped_samples > 8 * judging.num_steps
    assert f"on {8 * judging.num_steps} unseen samples ({judging.num_steps} step" in answer(plan)


def test_the_answer_names_the_sizes_at_which_a_plan_that_pays_surely_loses() -> None:
    def sized(tokens: float, low: float, high: float) -> SizedGain:
        return SizedGain(tokens_per_step=tokens, share=Metric(value=(low + high) / 2, low=low, high=high))

    judging, sizes = part("balance", 1.0, 2.0), (sized(64, -0.9, -0.5), sized(256, -0.9, 0.1), sized(1024, 0.3, 0.5))

    def reach(value: Any) -> str:
        gain = Metric(value=1.0, low=0.5, high=2.0)
        verdict = Verdict(value=value, metric="balance", against="x", gain=gain, at_least=0.0, sizes=sizes)
        plan: Any = SimpleNamespace(verdict=verdict, options={})
        return _reach(plan, judging)

    assert reach("benefit") == "; a loss at 64"
    assert "loss" not in reach("none"), "it is no benefit anyway"


def test_the_answer_says_which_parts_are_mostly_extrapolated_and_when_a_step_is_scaled_up(
    make_trace: Any, make_profile: Any
) -> None:
    plan = planned(make_trace(samples=40), "eplb", "1x2", profile=make_profile("1x2"))
    assert plan.verdict.metric == "step_s"
    shares = {"attention_s": 0.5, "experts_s": 0.51, "dispatch_s": 1.0, "moe_s": 1.0}
    tokens = plan.evaluation.judging.num_tokens
    for share, more, words in (
        ({}, 0, ""),
        ({}, 1, "; the step scaled up"),
        (shares, 0, "; seconds of experts and dispatch extrapolated"),
        (shares, 1, "; seconds of experts and dispatch extrapolated; the step scaled up"),
    ):
        judged = edited(plan, "options.seconds.extrapolated", share)
        judged = edited(judged, "evaluation.held_out.tokens_per_step", float(tokens + more))
        assert re.findall("; (?:seconds of|the step).*", answer(judged).split(", on ")[1]) == [words] * bool(words)


def test_memory_of_replicas_is_that_of_the_device_with_most_slots_above_its_share(make_trace: Any) -> None:
    """8 experts on the three devices that are alive, in 9 slots: 3 each, instead of 8 / 3."""
    plan = planned(make_trace(), "eplb", redundant=1, dead=(3,))
    assert plan.placement.slots.tolist() == [3, 3, 3, 0]
    more = (3 - plan.model.num_experts / 3) * plan.model.num_layers * plan.model.expert_bytes / 1e6
    assert f"1 replica per layer: +{more:.3g} MB per device" in answer(plan)


def test_every_metric_has_words_of_its_own_for_sentences_and_for_docs() -> None:
    assert all(spec.name == name and spec.noun and spec.meaning and spec.needs for name, spec in METRICS.items())
    assert len({spec.meaning for spec in METRICS.values()}) == len(METRICS)
    headlines = [spec.headline for spec in METRICS.values() if spec.headline is not None]
    assert len(set(headlines)) == len(headlines)


def test_a_plan_of_58_layers_fits_a_page(make_trace: Any) -> None:
    plan = planned(make_trace(layers=58, experts=64, top_k=8, samples=40), "contiguous", "2x8")
    assert screen(show_report, plan, Path("plan.json"), width=80).count("\n") <= 24


def test_a_plan_that_a_hand_has_edited_is_one_clear_refusal(make_trace: Any) -> None:
    plan = planned(make_trace(samples=40))
    for path, words in (
        ("verdict.metric", "a verdict on 'foo', which is no metric"),
        ("options.evaluation.samples_per_step", "options.evaluation: 1 values missing or wrong"),
    ):
        with pytest.raises(InputError, match=words):
            screen(show_report, edited(plan, path, "foo"), Path("plan.json"))


def test_metrics_are_named_by_their_rows_alone() -> None:
    """But where they are counted and priced; solvers' objectives, and a plan's keys, may be called alike."""
    planner = Path(moeplan.planner.__file__).parent
    alike = {"balance", "exchange_s", "hops_kept", "moe_s"}
    aside = {"certify/naive.py"}
    for path in planner.rglob("*.py"):
        name = path.relative_to(planner).as_posix()
        if name not in aside and not name.startswith("evaluate/"):
            values = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not values & (METRICS.keys() - alike), name


HOSTILE = "</script><script>alert(1)</script>"
PLOT = Plot(HOSTILE, [Line([1, 2], [3, 4], HOSTILE, words=[HOSTILE] * 2, shape="dots")], Axis(HOSTILE), Axis(HOSTILE))
BARS = Bars(HOSTILE, [Bar.stacked(HOSTILE, [(1.0, 1, HOSTILE)], HOSTILE)], Axis(HOSTILE), [(HOSTILE, 1)])
HEAT = Heat(HOSTILE, np.eye(3), 1.0, Axis(HOSTILE), Axis(HOSTILE), HOSTILE)
WORDS = Table([Column(HOSTILE, [HOSTILE]), Column(HOSTILE, [HOSTILE])], note=HOSTILE)
SECTION = Section("Head & tail", (Text.of("a < b"), Headline(HOSTILE), PLOT, BARS, HEAT, WORDS))


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A page of two sections."""
    write_page(tmp_path / "p.html", HOSTILE, "1 < 2", [SECTION, SECTION])
    return (tmp_path / "p.html").read_text()


def test_a_page_runs_nothing_and_refers_to_nothing_outside(page: str) -> None:
    assert not re.search(r"<script|@import|url\(|https?://|src=", page)
    assert {link[:22] for link in re.findall(r'href="([^"]*)"', page)} == {"data:image/png;base64,"}
    assert "default-src 'none'" in page


def test_what_is_said_or_named_in_a_picture_is_escaped(page: str) -> None:
    assert HOSTILE not in page
    assert "<title>&lt;/script&gt;&lt;script&gt;" in page
    assert "<p>1 &lt; 2</p>" in page
    assert "<h2>Head &amp; tail</h2><p>a &lt; b</p>" in page
    assert page.count("&lt;/script&gt;") > 20


def test_a_picture_is_well_formed_whatever_it_holds() -> None:
    nothing = Plot("", [Line([], [])], Axis(), Axis(log=True))
    flat = Plot("", [Line([1, 1], [0, 0]), Line([1, 1], [math.nan, 1])], Axis(log=True), Axis(zero=True))
    still = Bars("", [Bar.stacked("", [(0.0, 0, "")])], Axis())
    dark = Heat("", np.zeros((1, 4)), 0.0, small=True)
    for picture in (PLOT, BARS, HEAT, nothing, flat, still, dark):
        figure = ElementTree.fromstring(picture.html())
        assert not re.search(r"\bnan\b|\binf\b", picture.html())
        assert figure[0].attrib["viewBox"].startswith("0 0 ")


def test_an_axis_has_a_few_round_ticks_inside_its_ends() -> None:
    assert [words for _, words in Axis(ends=(0.97, 1.53)).marks] == ["1", "1.2", "1.4"]
    assert [words for _, words in Axis(ends=(1.101, 1.119)).marks] == ["1.105", "1.11", "1.115"]
    assert [words for _, words in Axis(ends=(1000, 2e6), log=True).marks] == ["1,000", "10k", "100k", "1M"]
    assert [words for _, words in Axis(ends=(128, 2048), log=True).marks] == ["200", "500", "1,000", "2,000"]
    shares = Axis(ends=(1, 100), log=True).place([1, 10, 1000], 0, 10)
    assert shares.tolist() == pytest.approx([0, 5, 10])  # what is beyond an end is drawn at it


def test_a_heat_map_is_an_image_with_a_pixel_a_cell() -> None:
    (data,) = re.findall(r"base64,([^\"]*)", Heat("", np.array([[0.0, 1.0, 2.0]]), 2.0, small=True).content()[0])
    png = base64.b64decode(data)
    assert struct.unpack(">II", png[16:24]) == (3, 1)
    start = png.index(b"IDAT")
    (size,) = struct.unpack(">I", png[start - 4 : start])
    assert [*zlib.decompress(png[start + 4 : start + 4 + size])] == [0, 0, 128, 255]  # a filter byte, then cells


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.html").mkdir()
    with pytest.raises(StorageError, match=r"p\.html"):
        write_page(tmp_path / "p.html", "x", "y", [SECTION])
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]


def test_it_pays_from_a_size_on_only_where_the_gain_is_sure() -> None:
    def sized(tokens: float, value: float, low: float | None) -> SizedGain:
        return SizedGain(tokens_per_step=tokens, share=Metric(value=value, low=low, high=None if low is None else 0.9))

    def words(*sizes: SizedGain, at_least: float = 0.0) -> str:
        gain = Metric(value=1.0, low=0.5, high=2.0)
        verdict = Verdict(value="benefit", metric="step_s", against="x", gain=gain, at_least=at_least, sizes=sizes)
        judging = part("balance", 1.0, 2.0).model_copy(update={"num_tokens": 500})
        return " ".join(by_size(verdict, judging))

    rising = sized(64, 0.0, -0.2), sized(256, 0.3, 0.2)
    assert words(*rising) == (
        "this plan by tokens per step (95 %): 0 % at 64 (-90.0 to +20.0 %), -30.0 % at 256 (-90.0 to -20.0 %); a sure"
        " gain from 256 on"
    )
    assert words(*rising[::-1]).endswith("; a sure gain at 256")
    wider = words(sized(64, 0.3, 0.2), sized(256, 0.4, -0.2))  # as much is gained, on fewer steps
    assert wider.endswith("-40.0 % at 256 (-90.0 to +20.0 %); a sure gain at 64")
    gapped = words(sized(64, 0.3, 0.2), sized(128, 0.3, -0.1), sized(256, 0.3, 0.2))  # says nothing of 128
    assert gapped.endswith("; a sure gain at 64 and 256")
    assert "certain" not in words(sized(64, 0.02, -0.2), sized(256, 0.3, -0.1))  # never sure
    assert "certain" not in words(sized(64, 0.3, 0.2), sized(256, 0.3, 0.1))  # always
    assert "certain" not in words(*rising, at_least=0.25)
    assert words(sized(64, 0.005, 0.001), rising[1]).endswith("; a sure gain from 256 on")  # 0.5 % does not matter
    assert words(sized(64, 0.3, None), sized(1024, 0.3, 0.2)).endswith(
        "-30.0 % at 64 (too few steps), -30.0 % at 1,024 (-90.0 to -20.0 %, scaled up); a sure gain from 1,024 on"
    )
    assert words(sized(64, 0.3, 0.2)) == ""


def tried(share: float, *parts: str, inner: float | None = None, **fields: Any) -> Tried:
    """A candidate of auto that gains so much, of parts whose strategies are their names."""
    kinds = {"eplb": "placement", "pipemoe": "pipeline"}
    usual: dict[str, Any] = {
        "decisions": tuple(kinds.get(part, "sample_policy") for part in parts),
        "dispatch_model": "standard",
        "has_interval": True,
        "gain": share,
        "listed": True,
        "engines": (),
        "metrics": {"balance": 1.0},
        "today": {"balance": 1.0},
    }
    low = share if inner is None else inner
    return Tried(parts=parts, inner=low, share=Metric(value=share), **usual | fields)


def auto_plan(*candidates: Tried, engine: str | None = None, **fields: Any) -> Any:
    """A plan of auto that chose the first of these candidates."""
    options = AutoOptions(engine=engine, metric="balance", tried=candidates, refused={})
    judged = EvaluationOptions(unit="sample", phases=(), use="prefill", home="ordinal", step="recorded")
    return SimpleNamespace(
        options={one.key: one.model_dump(mode="json") for one in (options, judged)},
        decisions=SimpleNamespace(names=candidates[0].decisions, wire=None),
        verdict=SimpleNamespace(share=candidates[0].share),
        placement=None,
        **fields,
    )


def test_candidates_have_the_figure_that_all_are_compared_by() -> None:
    lacks: list[dict[str, Any]] = [{"metrics": {}}, {"today": {"step_s": 1.0}}]
    for lacking in lacks:
        with pytest.raises(ValidationError, match="a candidate lacks balance, by which all are compared"):
            auto_plan(tried(0.4, "eplb"), tried(0.2, "pipemoe", **lacking))


def test_an_engine_that_carries_a_part_of_a_plan_has_the_gain_of_that_part() -> None:
    whole, part = tried(0.58, "eplb", "pipemoe"), tried(0.368, "pipemoe", engines=("tutel",))
    why = "it does not carry out the plan's placement"
    assert carried(auto_plan(whole, part), ENGINES["tutel"]) == f"with tutel: -36.8 %, not -58.0 %: {why}"
    alone = f"tutel will not reach -58.0 %: {why}; moeplan solve --engine tutel plans for it"
    assert carried(auto_plan(whole), ENGINES["tutel"]) == alone
    assert carried(auto_plan(part, whole), ENGINES["tutel"]) == ""
    foreign = tried(0.3, "pipemoe", engines=()), tried(0.2, "luffy", engines=("tutel",))  # not carried, not of the plan
    assert carried(auto_plan(whole, *foreign), ENGINES["tutel"]) == alone


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        ((0.2, -0.1, 0.4), "gain not certain"),
        ((0.01, -0.1, 0.4), "gain not certain"),
        ((0.009, -0.1, 0.4), "no benefit expected"),
        ((-0.2, -0.4, 0.1), "no benefit expected"),
        ((0.0, 0.0, 0.0), "no benefit expected"),
        ((-0.2, -0.4, -0.001), "worse than today, keep what runs"),
        ((0.2, None, None), "no benefit shown"),
    ],
)
def test_a_verdict_without_benefit_says_how_sure_it_is(gain: tuple[Any, Any, Any], words: str) -> None:
    share = Metric(value=gain[0], low=gain[1], high=gain[2])
    verdict = Verdict(value="none", metric="step_s", against="today", gain=share, at_least=0.0, share=share)
    plan: Any = SimpleNamespace(verdict=verdict)
    assert doubt(plan) == words


def test_an_exact_split_is_told_beside_the_even_one() -> None:
    judging = part("balance", 1.05, 2.0)
    even = Contender(name="plan, even", dispatch_model="standard", metrics={"balance": Metric(value=1.2)})
    both = judging.model_copy(update={"contenders": (*judging.contenders, even)})
    figures = "1.05 where steps are split exactly, 1.20 where not, on 3"

    def words(fit: Part, held_out: Part | None) -> str:
        plan: Any = SimpleNamespace(evaluation=Evaluation(fit=fit, held_out=held_out))
        return split_words(plan)

    assert words(judging, both) == f"{figures} unseen steps"
    assert words(both, None) == f"{figures} fitted steps"
    assert words(both, judging) == ""


def test_a_candidate_that_gains_more_here_is_left_out_for_what_it_gained_where_all_were_compared() -> None:
    others = tried(0.35, "pipemoe", inner=0.305), tried(0.4, "netmoe", inner=0.2), tried(0.2, "luffy")
    plan = auto_plan(tried(0.3, "eplb"), *others, engine="sglang", model=None)
    assert [*remarks(plan, part("balance", 1.0, 2.0))] == [
        "not chosen: netmoe, -40.0 % here; on the samples that chose, -20.0 % at worst (plan -30.0 %)",
        "not worth it: pipemoe, -35.0 % here; on the samples that chose, -30.5 % at worst (plan -30.0 %): within 1 % of"
        " the plan, which has fewer parts or slots",
    ]


def doubted(metric: str, dispatch_model: str, missing: dict[str, str]) -> str:
    """The doubts of a plan whose step is known, judged on a metric."""
    judging = part("step_s", 0.02, 0.03)
    ours, theirs = (
        one.model_copy(update={"metrics": {**one.metrics, metric: one.metrics["step_s"]}}) for one in judging.contenders
    )
    ours = ours.model_copy(update={"dispatch_model": dispatch_model})
    seconds = SecondsOptions(sources={}, missing=missing, extrapolated={}, other_dtype=())
    options = auto_plan(tried(0.3, "eplb")).options | {"seconds": seconds.model_dump(mode="json")}
    plan: Any = SimpleNamespace(
        verdict=Verdict(value="none", metric=metric, against=theirs.label, at_least=0.0, gain=Metric(value=0.01)),
        evaluation=None,
        judged_by=None,
        placement=None,
        inputs=SimpleNamespace(profile=None),
        decisions=SimpleNamespace(wire=None, sample_policy=None),
        cluster=SimpleNamespace(num_devices=4),
        fills=False,
        dispatch_model=dispatch_model,
        options=options,
    )
    return " ".join(doubts(plan, judging.model_copy(update={"contenders": (ours, theirs)})))


def test_a_verdict_on_less_than_the_step_that_is_known_says_why() -> None:
    words = f"judged by {METRICS['experts_s'].noun}: the two steps do not time the same passes"
    assert doubted("experts_s", "standard", {}) == words
    assert doubted("step_s", "standard", {}) == ""


def test_attention_that_is_not_timed_is_a_doubt_where_tokens_do_not_return_home() -> None:
    missing = {"attention": "no profile"}
    words = "attention is not timed; its time differs when tokens do not return home"
    assert [doubted("step_s", model, missing) for model in ("coherent", "standard")] == [words, ""]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (999.7, "1,000"),
        (9999.7, "10k"),
        (999_700, "1M"),
        (1234, "1,234"),
        (0.5, "0.5"),
        (12_345, "12.3k"),
        (-1e6, "-1M"),
    ],
)
def test_a_short_number_is_rounded_before_its_unit_is_chosen(value: float, words: str) -> None:
    assert short(value) == words
