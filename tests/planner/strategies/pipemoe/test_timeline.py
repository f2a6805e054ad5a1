"""Timelines as pictures and pages, of few chunks, of many and of hostile seconds."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError
from moeplan.planner.options import StageSeconds
from moeplan.planner.strategies.pipemoe.sections import stage_seconds
from moeplan.planner.strategies.pipemoe.timeline import timeline_picture, write_timeline
from tests.planner.makers import edited, options, planned

BASIS = "means over the fitted steps"
STAGES = ["dispatch", "experts", "combine"]


@pytest.fixture(scope="module")
def plan(make_trace: Any, make_profile: Any) -> Any:
    """A plan in few chunks."""
    return planned(make_trace(samples=60, tokens=200), "pipemoe", profile=make_profile(noise=0.0), max_degree=8)


def in_chunks(plan: Any, degree: int) -> Any:
    """The plan with layer 1 in so many chunks."""
    return edited(plan, "decisions/pipeline/forward/1", degree)


def picture(plan: Any, width: int) -> tuple[list[str], list[str]]:
    """The lines that draw layer 1, and its lanes: three in one piece, three in chunks."""
    lines = [*timeline_picture(plan, 1, width)]
    assert max(map(len, lines)) <= width
    return lines, [line.partition("|")[2] for line in lines if "|" in line]


def test_chunks_too_many_for_digits_are_shades_that_a_legend_explains(plan: Any) -> None:
    lines, lanes = picture(in_chunks(plan, 30), 80)
    assert BASIS in lines[0]
    assert any(line.startswith("░▒▓█ = share of a column") for line in lines)
    assert all({*lane} <= {*" ░▒▓█"} for lane in lanes[3:])
    assert max(map(len, lanes)) == 80 - 15  # the longest pass fills the width
    short = edited(in_chunks(plan, 9), "options/pipeline/forward/combine_s/1", [1e-12])  # no column shows each of nine
    assert "█" in "".join(picture(short, 80)[1][3:])


def test_few_chunks_are_digits_in_every_lane_and_no_shade_is_explained(plan: Any) -> None:
    lines, lanes = picture(in_chunks(plan, 4), 120)
    assert all({*lane} - {" "} == {*"0123"} for lane in lanes[3:])
    assert not any("█" in line for line in lines)
    (head,) = (row for row, line in enumerate(lines) if line.startswith("forward, 4 chunks, "))
    assert lines[head].endswith("% less than in one piece")
    assert [line.split()[0] for line in lines[head + 1 : head + 4]] == STAGES


def test_a_page_says_that_seconds_are_means_and_numbers_few_chunks_alone(plan: Any, tmp_path: Path) -> None:
    write_timeline(in_chunks(plan, 30), 1, tmp_path / "layer.html")
    text = (tmp_path / "layer.html").read_text()
    assert BASIS in text
    assert "experts 29: from " in text  # where one points at it
    assert ">29<" not in text
    write_timeline(in_chunks(plan, 4), 1, tmp_path / "layer.html")
    assert ">3<" in (tmp_path / "layer.html").read_text()


@pytest.mark.parametrize("method", ["exact", "unequal"])
def test_a_trace_for_chrome_has_named_lanes_of_events_that_do_not_overlap(
    make_trace: Any, make_profile: Any, tmp_path: Path, method: str
) -> None:
    trace, profile = make_trace(samples=32, tokens=400), make_profile("1x2", noise=0.0)
    plan = planned(trace, "pipemoe", profile=profile, method=method, max_degree=4)
    write_timeline(plan, 2, tmp_path / "layer.json")
    written = json.loads((tmp_path / "layer.json").read_text())
    assert (written["displayTimeUnit"], written["otherData"]["seconds"]) == ("ns", BASIS)
    events, lanes = written["traceEvents"], dict[tuple[int, int], list[Any]]()
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    degree, stages = plan.decisions.pipeline.forward[2], options(plan).forward
    assert degree > 1
    assert [(place, len(lane)) for place, lane in lanes.items()] == [
        ((process, stage), number) for process, number in ((1, 1), (2, degree)) for stage in (1, 2, 3)
    ]  # 0 is the idle process of a viewer
    for (process, stage), lane in lanes.items():
        for before, after in itertools.pairwise(lane):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-9
        if process == 2:
            seconds = getattr(stages, f"{STAGES[stage - 1]}_s")[2]
            expected = [*seconds] * (degree // len(seconds))
            assert [event["dur"] for event in lane] == pytest.approx([1e6 * one for one in expected])
    placed = [(one["pid"], one["tid"], one["args"]["sort_index"]) for one in events if "sort_index" in one["args"]]
    assert placed == [(process, thread, thread or process) for process in (1, 2) for thread in range(4)]
    names = [(one["pid"], one["tid"]) for one in events if one["name"].endswith("_name")]
    assert names == [(process, thread) for process, thread, _ in placed]


@pytest.mark.parametrize("seconds", [1e308, 1e200, 1e13])
def test_seconds_whose_sums_would_be_no_number_are_refused_in_a_line(plan: Any, seconds: float) -> None:
    hostile = edited(plan, "options/pipeline/forward/dispatch_s/1", [seconds])
    with pytest.raises(InputError, match=r"options\.pipeline: 1 values"):
        [*timeline_picture(hostile, 1, 80)]


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-310, 1e12])
def test_the_shortest_and_the_longest_seconds_are_drawn(plan: Any, tmp_path: Path, seconds: float) -> None:
    extreme = in_chunks(plan, 3)
    for stages in ("whole", "forward"):
        for stage in ("dispatch_s", "experts_s", "combine_s"):
            extreme = edited(extreme, f"options/pipeline/{stages}/{stage}/1", [seconds])
    picture(extreme, 80)
    write_timeline(extreme, 1, tmp_path / "b.json")
    write_timeline(extreme, 1, tmp_path / "b.html")
    assert "NaN" not in (tmp_path / "b.json").read_text()


def test_a_backward_pass_runs_the_stages_of_a_forward_pass_the_other_way_its_experts_slower() -> None:
    stages = StageSeconds(dispatch_s=((1.0,),), experts_s=((2.0,),), combine_s=((3.0,),))
    forward, backward = (stage_seconds(stages, 0, 2, backward=factor) for factor in (None, 2.0))
    assert [one.tolist() for one in forward] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert [one.tolist() for one in backward] == [[3.0] * 2, [4.0] * 2, [1.0] * 2]
