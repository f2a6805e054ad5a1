"""Strategies on the command line: planned, certified, drawn, compared; homes on a placement; a thorough bound."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.runtime.active import load_plan
from moeplan.runtime.decisions import SidecarFile
from moeplan.runtime.plan import load, save
from tests.planner.cli.conftest import ended, started
from tests.planner.makers import edited, tallied


def test_a_plan_that_replaces_a_file_says_so(moeplan: Any, tmp_path: Path) -> None:
    tallied(tmp_path / "traces")
    solve = ("solve", "--strategy", "eplb", "--cluster", "2x2")
    first, second = (moeplan(*solve, cwd=tmp_path).stdout for _ in range(2))
    assert "wrote plan.json" in first
    assert "replacing" not in first
    assert "wrote plan.json, replacing an earlier file" in second


@pytest.fixture(scope="module")
def piped(fresh_moeplan: Any, make_trace: Any, make_profile: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trace, a profile, a base and a pipelined plan on it."""
    folder = tmp_path_factory.mktemp("pipelined")
    (folder / "traces").symlink_to(make_trace(samples=60, tokens=200).path)
    (folder / "profile.json").symlink_to(make_profile())
    fresh_moeplan("solve", "--strategy", "exflow", "--dispatch", "standard", "-o", "base.json", cwd=folder)
    fresh_moeplan("solve", "--strategy", "pipemoe", "--on", "base.json", cwd=folder)
    return folder


def test_the_timeline_of_a_pipeline_is_a_screen_a_page_and_events(moeplan: Any, piped: Path) -> None:
    show = ("show", "plan.json", "--timeline", "1")
    lines = moeplan(*show, cwd=piped, COLUMNS="120").stdout.splitlines()
    assert [sum(line.startswith(stage) for line in lines) for stage in ("dispatch", "experts", "combine")] == [2] * 3
    assert 80 < max(map(len, lines)) <= 120
    for name in ("layer.html", "layer.json"):
        moeplan(*show, "-o", name, cwd=piped)
    assert ">forward in one piece" in (piped / "layer.html").read_text()
    events = json.loads((piped / "layer.json").read_text())["traceEvents"]
    assert json.loads(moeplan(*show, "--json", cwd=piped).stdout)["traceEvents"] == events


def test_apply_certifies_the_degrees_and_makes_the_plan_active(moeplan: Any, piped: Path) -> None:
    assert "certified plan.json against traces" in " ".join(moeplan("apply", "plan.json", cwd=piped).stdout.split())
    said = " ".join(moeplan("certify", "plan.json", cwd=piped).stdout.split())
    for what in ("against traces", "degrees", "objective of pipeline", "bound of pipeline", "predicted seconds"):
        assert what in said
    assert (piped / ".moeplan" / "active.json").read_bytes() == (piped / "plan.json").read_bytes()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("solve", "--strategy", "pipemoe", "--on", "base.json", "--cluster", "2x2"), 2, "leave --cluster out"),
        (("solve", "--strategy", "pipemoe", "--on", "base.json", "--link", "intra=1:1"), 2, "leave it out"),
        (("show", "plan.json", "--timeline", "3"), 2, "0 to 2"),
        (("show", "base.json", "--timeline", "0"), 3, "no pipeline"),
        (("show", "plan.json", "-o", "x.html"), 2, "--timeline"),
        (("show", "plan.json", "--timeline", "0", "-o", "x.txt"), 2, ".html"),
    ],
    ids=str,
)
def test_what_a_pipeline_has_not_is_one_line(refuse: Any, piped: Path, args: Any, code: int, words: str) -> None:
    refuse(*args, cwd=piped, code=code, words=words)


def test_homes_are_solved_certified_and_applied(moeplan: Any, refuse: Any, make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=96, tokens=6, top_k=1, seed=3).path
    solved = moeplan("solve", "--strategy", "netmoe", "--trace", trace, "--cluster", "2x2", "-v", cwd=tmp_path).stdout
    for words in ("locality", "oracle, migrating", "wrote", "next: moeplan apply plan.json"):
        assert words in solved
    written = json.loads((tmp_path / "plan.json").read_text())
    predictor = written["decisions"]["sample_policy"]["predictor"]
    assert (tmp_path / predictor["file"]).is_file()
    certified = json.loads(moeplan("certify", "plan.json", "--trace", trace, "--json", cwd=tmp_path).stdout)
    assert {"predictor", "verdict", "metrics of every contender"} <= set(certified["checks"])
    assert moeplan("apply", "plan.json", cwd=tmp_path).stderr == ""
    assert load_plan(tmp_path / ".moeplan" / "active.json").decisions.sample_policy is not None
    assert any(predictor["sha256"][:16] in path.name for path in (tmp_path / ".moeplan").iterdir())
    (tmp_path / predictor["file"]).write_bytes(b"other")
    refuse("certify", "plan.json", "--trace", trace, cwd=tmp_path, code=5, words="has hash")
    garbage = SidecarFile.of("predictor", b"garbage")
    (tmp_path / garbage.file).write_bytes(b"garbage")
    forged = edited(load(tmp_path / "plan.json"), "decisions.sample_policy.predictor", garbage.model_dump())
    save(edited(forged, "inputs.trace.path", "nowhere"), tmp_path / "forged.json")
    refuse("apply", "forged.json", cwd=tmp_path, code=3, words="no predictor of this plan in 7 bytes")


@pytest.fixture(scope="module")
def compared(moeplan: Any, make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two plans, their trace and another one."""
    home = tmp_path_factory.mktemp("compare")
    (home / "traces").symlink_to(make_trace(samples=80).path)
    (home / "new").symlink_to(make_trace(samples=90, seed=1).path)
    (home / "wider").symlink_to(make_trace(samples=8, experts=16).path)
    moeplan("solve", "--strategy", "exflow", "--cluster", "2x2", "--objective", "copies", cwd=home)
    moeplan("solve", "--cluster", "2x2", "--strategy", "contiguous", "-o", "plain.json", cwd=home)
    return home


def test_a_plan_that_pays_on_new_text_ends_with_0(moeplan: Any, compared: Path) -> None:
    said = moeplan("compare", "plan.json", "--trace", "new", cwd=compared).stdout
    assert "plan.json pays:" in said
    assert "when it was solved" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


def test_one_that_does_not_ends_with_8_its_table_on_stdout_and_its_name_on_stderr(moeplan: Any, compared: Path) -> None:
    args = ("compare", "plan.json", "plain.json", "--trace", "new")
    done = moeplan(*args, "--replica-rule", "static", "-o", "compared.html", cwd=compared, code=8)
    assert "a fixed one for each device" in done.stdout
    assert (compared / "compared.html").read_text().count("<h2>") > 2
    assert "plain.json does not pay: " in done.stdout
    anew = "moeplan solve --trace new --tokens-per-step 16384"
    assert done.stderr == f"moeplan: the trace new shows no benefit of plain.json; solve anew: {anew}\n"
    printed = json.loads(moeplan(*args, "--json", cwd=compared, code=8).stdout)
    assert printed["no_longer_pay"] == ["plain.json"]
    assert printed["plans"][1]["against_first"]["gain"]["value"] < 0


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_screen_shows_every_figure_and_name_of_a_wide_one(moeplan: Any, compared: Path, width: int) -> None:
    (compared / "placed-by-copies.json").write_bytes((compared / "plan.json").read_bytes())
    args = ("compare", "plan.json", "plain.json", "placed-by-copies.json", "--trace", "new")
    for more in ((), ("--verbose",)):
        wide, narrow = (
            moeplan(*args, *more, cwd=compared, code=8, COLUMNS=str(columns)).stdout for columns in (400, width)
        )
        assert not Counter(wide.split()) - Counter(narrow.split())
        assert max(map(len, narrow.splitlines())) <= width
        assert max(map(len, wide.splitlines())) > 80


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("plan.json", "--trace", "nowhere"), 3, "nowhere"),
        (("plan.json", "--trace", "wider"), 4, "num_experts"),
        (("plan.json", "--trace", "new", "--phase", "decode"), 2, "decode"),
        ((), 2, "Missing argument 'plans'"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_one_line(refuse: Any, compared: Path, args: Any, code: int, words: str) -> None:
    refuse("compare", *args, cwd=compared, code=code, words=words)


SEARCHED_CPU_S = 8.0  # start, a second of search on two threads, and some of the bound, which would take a minute
THOROUGH = ("--strategy", "exflow", "--time-limit", "1", "--bound", "thorough", "--fit-fraction", "1")


@pytest.fixture(scope="module")
def loose(moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 24 experts that follow each other loosely."""
    folder, rng = tmp_path_factory.mktemp("bounded"), np.random.default_rng(1)
    ids = np.cumsum(rng.geometric(0.2, (4000, 18)), axis=1) % 24
    np.save(folder / "ids.npy", ids[:, :, None].astype(np.uint8))
    moeplan("trace", "import", "ids.npy", "-o", "traces", "--num-experts", "24", cwd=folder)
    return folder


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed, however busy the machine."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_during_the_bound_ends_with_130_and_keeps_the_plan_with_its_bound(moeplan: Any, loose: Path) -> None:
    process = started("solve", "--cluster", "1x3", *THOROUGH, "-o", "cut.json", cwd=loose)
    while cpu_s(process.pid) < SEARCHED_CPU_S:
        assert process.poll() is None
        time.sleep(0.1)
    pressed = time.monotonic()
    ended(process, signal.SIGINT, 130)
    assert time.monotonic() - pressed < 15
    outcome = json.loads((loose / "cut.json").read_text())["outcome"]["placement"]
    assert (outcome["status"], outcome["bound"] >= outcome["objective"]["value"]) == ("interrupted", True)
    moeplan("certify", "cut.json", "--trace", "traces", cwd=loose)
