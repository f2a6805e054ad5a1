"""Timelines as pictures and pages, of few chunks, of many and of hostile seconds."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.planner.options import StageSeconds
from moeplan.planner.strategies.pipemoe.sections import stage_seconds
from moeplan.planner.strategies.pipemoe.timeline import timeline_picture, timelines, trace_events, write_timeline
from tests.planner.makers import edited, planned

BASIS = "means over the fitted steps"


@pytest.fixture(scope="module")
def plan(make_trace: Any, make_profile: Any) -> Any:
    """A plan in few chunks."""
    return planned(make_trace(samples=60, tokens=200), "pipemoe", profile=make_profile(noise=0.0), max_degree=8)


def in_chunks(plan: Any, degree: int) -> Any:
    """The plan with layer 1 in so many chunks."""
    return edited(plan, "decisions/pipeline/forward/1", degree)


def test_chunks_too_many_for_digits_are_shades_that_a_legend_explains(plan: Any) -> None:
    lines = [*timeline_picture(in_chunks(plan, 30), 1, 80)]
    assert max(map(len, lines)) <= 80
    assert BASIS in lines[0]
    assert any(line.startswith("░▒▓█ = share of a column") for line in lines)
    lanes = [line.partition("|")[2] for line in lines if "|" in line]
    assert all({*lane} <= {*" ░▒▓█"} for lane in lanes[3:])
    assert max(map(len, lanes)) == 80 - 15  # the longest pass fills the width


def test_few_chunks_are_digits_and_no_shade_is_explained(plan: Any) -> None:
    lines = [*timeline_picture(in_chunks(plan, 4), 1, 120)]
    assert not any("█" in line for line in lines)
    assert {*"".join(line.partition("|")[2] for line in lines[7:])} == {*" 0123"}


def test_a_chunk_that_no_column_shows_makes_its_pass_one_of_shades(plan: Any) -> None:
    """Nine chunks whose combines share a column or two cannot all be seen."""
    short = edited(in_chunks(plan, 9), "options/pipeline/forward/combine_s/1", [1e-12])
    lines = [*timeline_picture(short, 1, 80)]
    assert any("█" in line for line in lines[6:])


def test_what_is_drawn_says_that_seconds_are_means(plan: Any, tmp_path: Path) -> None:
    write_timeline(plan, 1, tmp_path / "layer.json")
    assert json.loads((tmp_path / "layer.json").read_text())["otherData"]["seconds"] == BASIS
    write_timeline(in_chunks(plan, 30), 1, tmp_path / "layer.html")
    page = (tmp_path / "layer.html").read_text()
    assert BASIS in page
    assert '"text":["29' not in page.replace(" ", "")


@pytest.mark.parametrize("seconds", [1e308, 1e200, 1e13])
def test_seconds_whose_sums_would_be_no_number_are_refused_in_a_line(plan: Any, tmp_path: Path, seconds: float) -> None:
    hostile = edited(plan, "options/pipeline/forward/dispatch_s/1", [seconds])
    with pytest.raises(InputError, match=r"options\.pipeline: 1 values"):
        [*timeline_picture(hostile, 1, 80)]
    for name in ("b.html", "b.json"):
        with pytest.raises(InputError, match=r"options\.pipeline: 1 values"):
            write_timeline(hostile, 1, tmp_path / name)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-310, 1e12])
def test_the_shortest_and_the_longest_seconds_are_drawn(plan: Any, tmp_path: Path, seconds: float) -> None:
    extreme = in_chunks(plan, 3)
    for stages in ("whole", "forward"):
        for stage in ("dispatch_s", "experts_s", "combine_s"):
            extreme = edited(extreme, f"options/pipeline/{stages}/{stage}/1", [seconds])
    assert max(map(len, timeline_picture(extreme, 1, 80))) <= 80
    write_timeline(extreme, 1, tmp_path / "b.json")
    write_timeline(extreme, 1, tmp_path / "b.html")
    assert "NaN" not in (tmp_path / "b.json").read_text()


def test_a_backward_pass_runs_the_stages_of_a_forward_pass_the_other_way_its_experts_slower() -> None:
    stages = StageSeconds(dispatch_s=((1.0,),), experts_s=((2.0,),), combine_s=((3.0,),))
    forward, backward = (stage_seconds(stages, 0, 2, backward=factor) for factor in (None, 2.0))
    assert [one.tolist() for one in forward] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert [one.tolist() for one in backward] == [[3.0] * 2, [4.0] * 2, [1.0] * 2]


def test_a_trace_for_chrome_keeps_passes_and_stages_in_their_order(plan: Any) -> None:
    events = trace_events(timelines(plan, 1), 1)
    placed = [(one["pid"], one["tid"], one["args"]["sort_index"]) for one in events if "sort_index" in one["args"]]
    assert placed == [(process, thread, thread or process) for process in (1, 2) for thread in range(4)]
