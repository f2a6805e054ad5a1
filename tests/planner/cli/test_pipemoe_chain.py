"""PipeMoE as typed: a placement, its degrees on top, the timeline, the certificate, the active plan."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def home(fresh_moeplan: Any, make_trace: Any, make_profile: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trace, a profile, a base and a pipelined plan on it."""
    folder = tmp_path_factory.mktemp("pipelined")
    (folder / "traces").symlink_to(make_trace(samples=60, tokens=200).path)
    (folder / "profile.json").symlink_to(make_profile())
    fresh_moeplan("solve", "--dispatch", "standard", "-o", "base.json", cwd=folder)
    fresh_moeplan("solve", "--strategy", "pipemoe", "--on", "base.json", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def plan(home: Path) -> Any:
    return json.loads((home / "plan.json").read_text())


def lanes_of(document: Any) -> dict[tuple[int, int], list[Any]]:
    """The events that are drawn, by pass and stage."""
    lanes: dict[tuple[int, int], list[Any]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    return lanes


def test_the_plan_names_its_base_and_holds_both_decisions(plan: Any) -> None:
    assert plan["strategies"] == ["exflow", "pipemoe"]
    assert plan["inputs"]["base"]["path"] == "base.json"
    assert set(plan["decisions"]) == {"placement", "pipeline", "dispatch"}
    assert len(plan["options"]["pipeline"]["a2a_ffn_overlap_degree"]) == 3


@pytest.mark.parametrize("columns", [80, 120])
def test_the_timeline_fits_the_screen(moeplan: Any, home: Path, columns: int) -> None:
    args = ("show", "plan.json", "--timeline", "1")
    assert max(map(len, moeplan(*args, cwd=home, COLUMNS=str(columns)).stdout.splitlines())) <= columns


def test_the_timeline_has_a_lane_a_stage_in_which_every_chunk_appears(moeplan: Any, home: Path, plan: Any) -> None:
    degree = plan["decisions"]["pipeline"]["forward"][1]
    said = moeplan("show", "plan.json", "--timeline", "1", cwd=home).stdout
    forward = said.partition("\nforward, ")[2].splitlines()
    assert forward[0].startswith(f"{degree} chunks, ")
    assert forward[0].endswith("% less than in one piece")
    for line, stage in zip(forward[1:4], ("dispatch", "experts", "combine"), strict=True):
        label, _, lane = line.partition("|")
        assert label.startswith(stage)
        assert 0 < int(label.split()[1].rstrip("%")) <= 100
        assert sorted(set(lane.replace(" ", ""))) == [str(chunk) for chunk in range(degree)]


def test_the_timeline_becomes_a_page_and_a_trace_of_events_that_do_not_overlap_in_a_lane(
    moeplan: Any, home: Path, plan: Any
) -> None:
    moeplan("show", "plan.json", "--timeline", "2", "-o", "layer.html", cwd=home)
    assert "<h2>forward" in (home / "layer.html").read_text()
    moeplan("show", "plan.json", "--timeline", "2", "-o", "layer.json", cwd=home)
    written = json.loads((home / "layer.json").read_text())
    assert set(written) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert written["displayTimeUnit"] == "ns"
    lanes, degree = lanes_of(written), plan["decisions"]["pipeline"]["forward"][2]
    assert [len(lane) for lane in lanes.values()] == [1] * 3 + [degree] * 3
    for lane in lanes.values():
        for before, after in itertools.pairwise(lane):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-9
    for (_, thread), lane in [*lanes.items()][3:]:
        (seconds,) = plan["options"]["pipeline"]["forward"][f"{('dispatch', 'experts', 'combine')[thread - 1]}_s"][2]
        assert [event["dur"] for event in lane] == pytest.approx([1e6 * seconds] * degree)


def test_the_trace_follows_the_trace_event_format(moeplan: Any, home: Path) -> None:
    document = json.loads(moeplan("show", "plan.json", "--timeline", "1", "--json", cwd=home).stdout)
    events, lanes = document["traceEvents"], lanes_of(document)
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in itertools.chain(*lanes.values()):
        assert {"name", "cat", "args"} <= set(event)
        assert min(event["ts"], event["dur"]) >= 0
    assert min(map(min, lanes)) > 0  # 0 is the idle process of a viewer
    for kind, places in (("thread", lanes.keys()), ("process", {(process, 0) for process, _ in lanes})):
        for named, value in ((f"{kind}_name", "name"), (f"{kind}_sort_index", "sort_index")):
            names = {(event["pid"], event["tid"]): event["args"][value] for event in events if event["name"] == named}
            assert names.keys() == places
            assert all(isinstance(one, str if value == "name" else int) for one in names.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--method", "unequal"), "chunks are unequal in"),
        (("--capacity-factor", "1.25"), "every expert's buffer holds 1.25 times the mean"),
        (("--method", "robust", "--joint", "--full-duplex", "--max-degree", "4"), "of a forward pass: dispatch "),
    ],
    ids=" ".join,
)
def test_every_choice_is_solved_certified_and_drawn(moeplan: Any, home: Path, flags: Any, words: str) -> None:
    said = moeplan("solve", "--strategy", "pipemoe", *flags, "-o", "chosen.json", cwd=home).stdout
    assert words in " ".join(said.split())
    certify = ("certify", "chosen.json", "--trace", "traces", "--profile", "profile.json")
    assert "verdict" in moeplan(*certify, cwd=home).stdout
    plan = json.loads((home / "chosen.json").read_text())
    lanes = lanes_of(json.loads(moeplan("show", "chosen.json", "--timeline", "0", "--json", cwd=home).stdout))
    degree = plan["decisions"]["pipeline"]["forward"][0]
    if degree > 1:
        assert [len(lanes[2, stage]) for stage in (1, 2, 3)] == [degree] * 3
    if "shares" in plan["decisions"]["pipeline"]:
        seconds = plan["options"]["pipeline"]["forward"]["experts_s"][0]
        assert [event["dur"] for event in lanes[2, 2]] == pytest.approx([1e6 * x for x in seconds])


def test_apply_certifies_the_degrees_and_makes_the_plan_active(moeplan: Any, home: Path) -> None:
    done = moeplan("apply", "plan.json", "--", "echo", "started", cwd=home)
    assert done.stderr == ""
    assert done.stdout.endswith("started\n")
    said = " ".join(done.stdout.split())
    assert "against traces" in said
    assert all(what in said for what in ("degrees", "objective of pipeline", "bound of pipeline", "predicted seconds"))
    assert (home / ".moeplan" / "active.json").read_bytes() == (home / "plan.json").read_bytes()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("solve", "--strategy", "pipemoe", "--on", "plan.json"), 2, "not again"),
        (("solve", "--strategy", "pipemoe", "--on", "nowhere.json"), 3, "nowhere.json"),
        (("solve", "--strategy", "pipemoe", "--on", "base.json", "--cluster", "2x2"), 2, "leave --cluster out"),
        (("solve", "--strategy", "pipemoe", "--on", "base.json", "--link", "intra=1:1"), 2, "leave it out"),
        (("solve", "--strategy", "pipemoe", "--capacity-factor", "much"), 2, "--capacity-factor"),
        (("show", "plan.json", "--timeline", "3"), 2, "0 to 2"),
        (("show", "plan.json", "--timeline", "-1"), 2, "0 to 2"),
        (("show", "base.json", "--timeline", "0"), 3, "no pipeline"),
        (("show", "plan.json", "-o", "x.html"), 2, "--timeline"),
        (("show", "plan.json", "--timeline", "0", "-o", "x.txt"), 2, ".html"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line_and_leaves_no_file(
    refuse: Any, home: Path, args: Any, code: int, words: str
) -> None:
    refuse(*args, cwd=home, code=code, words=words)


def test_without_a_profile_pipemoe_says_what_it_needs(refuse: Any, home: Path, tmp_path: Path) -> None:
    (tmp_path / "traces").symlink_to(home / "traces")
    refuse("solve", "--strategy", "pipemoe", "--cluster", "1x4", cwd=tmp_path, code=2, words="no profile")


def test_homes_on_top_of_replicas_and_degrees_make_one_plan_of_all_three(moeplan: Any, home: Path) -> None:
    moeplan("solve", "--strategy", "eplb", "--redundant", "4", "-o", "replicas.json", cwd=home)
    moeplan("solve", "--strategy", "pipemoe", "--on", "replicas.json", "-o", "degrees.json", cwd=home)
    moeplan("solve", "--strategy", "netmoe", "--on", "degrees.json", "-o", "all.json", cwd=home)
    degrees, plan = (json.loads((home / name).read_text()) for name in ("degrees.json", "all.json"))
    assert plan["strategies"] == ["eplb", "pipemoe", "netmoe"]
    kept = ("placement", "pipeline")
    assert {name: plan["decisions"][name] for name in kept} == {name: degrees["decisions"][name] for name in kept}
    ours, today, *_ = plan["evaluation"]["held_out"]["contenders"]
    assert {"moe_s", "exchange_s", "step_s"} <= set(ours["metrics"]) & set(today["metrics"])
    certified = moeplan("certify", "all.json", "--trace", "traces", "--profile", "profile.json", "--json", cwd=home)
    assert "verdict" in json.loads(certified.stdout)["checks"]
    assert "forward" in moeplan("show", "all.json", "-v", cwd=home).stdout
    moeplan("apply", "all.json", cwd=home)
