"""What the screen says of predicted seconds."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moeplan.errors import InputError
from moeplan.planner.reports.plan import show_report
from moeplan.planner.request import Request
from moeplan.planner.solve import solve
from moeplan.planner.tables.seconds import PARTS, TimeUnit, print_seconds_table
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.profile import load
from moeplan.runtime.plan import Contender, Metric, Part, Plan, parse


@pytest.fixture(scope="module")
def plan(make_trace: Any, make_profile: Any) -> Plan:
    """Of two nodes, timed by a profile without attention."""
    profile = make_profile("2x2", cases=("all_to_all", "all_gather", "expert_ffn"))
    trace = make_trace(samples=80, tokens=100)
    return solve(Request(strategy="exflow", trace=str(trace.path), cluster=load(profile).cluster, profile=profile))


def screen(plan: Plan, width: int) -> str:
    console = Console(width=width, record=True, highlight=False, markup=False)
    show_report(plan, Path("plan.json"), console)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_shows_parts_links_origin_and_what_is_missing(plan: Plan, width: int) -> None:
    text = screen(plan, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in ("dispatch", "experts", "combine", "K/V", "step (range)", "of these, by link"):
        assert part in words
    assert "experts: expert_ffn/fp32" in words
    assert "experts as measured in another dtype" in words  # the model has 2 bytes an element
    assert "no seconds of attention: the profile has no attention" in words
    assert "judged by device_copies, not by the step: attention is not in it" in words
    assert "a step takes" not in words
    assert "EXTRAPOLATED" in words


def test_without_a_profile_it_is_the_profile_that_is_missing(make_trace: Any) -> None:
    cluster = Cluster.parse("1x4", ["intra=10:5"])
    found = solve(Request(strategy="exflow", trace=str(make_trace(samples=40).path), cluster=cluster))
    words = " ".join(screen(found, 120).split())
    assert "no seconds of experts: no profile" in words
    assert "no seconds of attention: no profile" in words


def test_with_attention_the_verdict_is_on_the_step_and_nothing_has_to_be_explained(
    make_trace: Any, make_profile: Any
) -> None:
    profile, trace = make_profile("1x4"), make_trace(samples=40)
    found = solve(Request(strategy="exflow", trace=str(trace.path), cluster=load(profile).cluster, profile=profile))
    words = " ".join(screen(found, 120).split())
    assert "a step takes" in words
    assert "judged by" not in words


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("step_s", "a step takes 105 ms (no interval) more than contiguous, standard"),
        ("device_copies", "0.105 (no interval) more copies than"),
        ("balance", "balance higher by 0.105 (no interval) than"),
    ],
)
def test_a_loss_without_an_interval_reads_as_a_loss(plan: Plan, metric: str, words: str) -> None:
    value = plan.model_dump(mode="json")
    value["verdict"] |= {"metric": metric, "value": "none", "gain": {"value": -0.105, "low": None, "high": None}}
    for contender in value["evaluation"]["held_out"]["contenders"]:
        contender["metrics"]["step_s"]["value"] = 0.9
    assert words in " ".join(screen(parse(value, "edited"), 120).split())


def test_options_that_are_no_options_are_refused_in_a_line(plan: Plan) -> None:
    value = plan.model_dump(mode="json")
    value["options"]["seconds"]["extrapolated"] = {"step_s": "much"}
    with pytest.raises(InputError, match=r"options\.seconds"):
        screen(parse(value, "edited"), 80)


@pytest.mark.parametrize(
    ("longest", "name", "text"), [(483.4, "s", "483"), (0.0539, "ms", "53.9"), (0.00144, "us", "1,440")]
)
def test_the_unit_is_that_of_the_longest_step(plan: Plan, longest: float, name: str, text: str) -> None:
    assert plan.evaluation is not None
    part = plan.evaluation.fit.model_dump(mode="json")
    for contender in part["contenders"]:
        contender["metrics"] = {"step_s": {"value": longest}}
    unit = TimeUnit.of(type(plan.evaluation.fit).model_validate(part))
    assert (unit.name, unit.text(longest)) == (name, text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (10, "10.0 s"), (9.99, "9,990 ms"), (0.01, "10.0 ms"), (0.0099, "9,900 us"), (0, "0.00 us")],
)
def test_a_single_figure_is_followed_by_its_unit(seconds: float, text: str) -> None:
    assert TimeUnit.worded(seconds) == text


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_of_the_widest_table_is_cut(width: int) -> None:
    seconds = {name: Metric(value=0.1234, low=None, high=None) for _, name in PARTS}
    step = Metric(value=1.234, low=0.1467, high=9.8765)
    contenders = tuple(
        Contender(name=name, dispatch_model="standard", metrics=seconds | {"step_s": step})
        for name in ("a-long-name-of-a-plan.json", "pmj.json")
    )
    console = Console(width=width, record=True, highlight=False, markup=False)
    part = Part(num_samples=1, num_tokens=1, num_steps=1, dropped_samples=0, contenders=contenders)
    print_seconds_table(part, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert [text.split().count(found) for found in ("123", "1,234", "(147-9,876)")] == [2 * len(PARTS), 2, 2]
    assert all(f" {header} " in text.splitlines()[0] + text.splitlines()[1] for header, _ in PARTS)
