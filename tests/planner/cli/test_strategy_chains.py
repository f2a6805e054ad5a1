"""Strategies on the command line: planned, certified, drawn, compared; homes on a placement; a thorough bound."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.runtime.active import load_plan
from moeplan.runtime.decisions import SidecarFile
from moeplan.runtime.plan import load, save
from tests.planner.cli.conftest import ended, started
from tests.planner.makers import edited, tallied


def test_counts_are_weighed_planned_certified_and_drawn(moeplan: Any, tmp_path: Path) -> None:
    tallied(tmp_path / "counts", hidden_size=64, ffn_size=96, dtype_bytes=2)
    solve = ("solve", "--strategy", "eplb", "--trace", "counts")
    solved = moeplan(*solve, "--cluster", "2x2", "--redundant", "auto", "-v", cwd=tmp_path).stdout
    for words in ("MB/device", "(chosen)", "less load on the busiest device than today"):
        assert words in solved
    assert all(len(line) <= 80 for line in solved.splitlines())
    certified = moeplan("certify", "plan.json", "--trace", "counts", cwd=tmp_path).stdout
    assert "objective" in certified
    assert "wrote" in moeplan("show", "plan.json", "-o", "weighed.html", cwd=tmp_path).stdout
    assert "redundant experts per layer" in (tmp_path / "weighed.html").read_text()
    wishes = ("--dead", "1", "--pin", "3@0", "--pin", "5@2", "--redundant", "5", "--quantile", "0.9", "--json")
    printed = json.loads(moeplan(*solve, "--cluster", "1x4", *wishes, "-o", "other.json", cwd=tmp_path).stdout)
    assert printed["options"]["placement"]["pins"] == [[3, 0], [5, 2]]
    assert printed["outcome"]["placement"]["objective"]["name"] == "step_balance_p90"
    placement = json.loads((tmp_path / "other.json").read_text())["decisions"]["placement"]
    assert placement["slots_per_device"] == [7, 0, 7, 7]


def test_traces_are_mixed_by_their_weights(moeplan: Any, tmp_path: Path) -> None:
    for seed in (1, 2):
        tallied(tmp_path / f"t{seed}", seed=seed)
    mixed = ("--trace", "t1:0.7", "--trace", "t2:0.3", "--cluster", "1x4", "--redundant", "4")
    said = moeplan("solve", "--strategy", "eplb", *mixed, cwd=tmp_path).stdout
    assert "weighted means over traces: t1 70%, t2 30%" in said.replace("\n", " ")


def test_plans_are_compared_as_an_engine_replays_them_with_a_page_of_bytes(
    moeplan: Any, make_trace: Any, tmp_path: Path
) -> None:
    trace, new = (make_trace(samples=96, seed=seed).path for seed in (1, 2))
    solve = ("solve", "--strategy", "eplb", "--trace", trace, "--cluster", "2x2", "--redundant")
    for name, extra in (("a.json", 0), ("b.json", 8)):
        moeplan(*solve, extra, "-o", name, cwd=tmp_path)
    flags: tuple[Any, ...] = ("--trace", new, "--replica-rule", "static", "-o", "bytes.html")
    done = moeplan("compare", "a.json", "b.json", *flags, cwd=tmp_path)
    assert "a fixed one for each device" in done.stdout
    assert "experts move" in done.stdout
    assert (tmp_path / "bytes.html").read_text().count("<h2>") == 4


def test_placement_then_homes_then_certified_then_applied(
    moeplan: Any, refuse: Any, make_trace: Any, tmp_path: Path
) -> None:
    trace = make_trace(samples=96, tokens=6, top_k=1, seed=3).path
    exflow = ("solve", "--dispatch", "standard", "--time-limit", "5", "--trace", trace, "--cluster", "2x2")
    moeplan(*exflow, "-o", "base.json", cwd=tmp_path)
    solved = moeplan("solve", "--strategy", "netmoe", "--on", "base.json", "--trace", trace, "-v", cwd=tmp_path).stdout
    for words in (
        "locality",
        "fewer bytes between nodes than base, standard",
        "the placement alone saves",
        "oracle, migrating",
        "wrote",
        "next: moeplan apply plan.json",
    ):
        assert words in " ".join(solved.split())
    written = json.loads((tmp_path / "plan.json").read_text())
    predictor = written["decisions"]["sample_policy"]["predictor"]
    assert (tmp_path / predictor["file"]).is_file()
    certified = json.loads(moeplan("certify", "plan.json", "--trace", trace, "--json", cwd=tmp_path).stdout)
    assert {"predictor", "verdict", "metrics of every contender"} <= set(certified["checks"])
    assert moeplan("apply", "plan.json", cwd=tmp_path).stderr == ""
    assert load_plan(tmp_path / ".moeplan" / "active.json").decisions.sample_policy is not None
    assert any(predictor["sha256"][:16] in path.name for path in (tmp_path / ".moeplan").iterdir())
    assert "a combine delivers" in moeplan("show", "plan.json", cwd=tmp_path).stdout
    (tmp_path / predictor["file"]).write_bytes(b"other")
    refuse("certify", "plan.json", "--trace", trace, cwd=tmp_path, code=5, words="has hash")
    garbage = SidecarFile.of("predictor", b"garbage")
    (tmp_path / garbage.file).write_bytes(b"garbage")
    forged = edited(load(tmp_path / "plan.json"), "decisions.sample_policy.predictor", garbage.model_dump())
    save(edited(forged, "inputs.trace.path", "nowhere"), tmp_path / "forged.json")
    refuse("apply", "forged.json", cwd=tmp_path, code=3, words="no predictor of this plan in 7 bytes")


def test_counts_are_imported_planned_and_certified(moeplan: Any, refuse: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = np.array([[rng.multinomial(64, p)] * 3 for p in rng.dirichlet(np.full(8, 0.4), 96)])
    np.savez(tmp_path / "c.npz", counts=counts, n_tokens=np.full(96, 32))
    moeplan("trace", "import", "c.npz", "-o", "t", "--hidden-size", "64", "--dtype-bytes", "2", cwd=tmp_path)
    netmoe = ("solve", "--strategy", "netmoe", "--trace", "t", "--cluster", "2x2")
    printed = json.loads(moeplan(*netmoe, "--json", cwd=tmp_path).stdout)
    assert printed["verdict"]["value"] == "benefit"
    assert printed["options"]["sample_policy"]["copies"] == "pairs"
    assert "verdict" in moeplan("certify", "plan.json", "--trace", "t", cwd=tmp_path).stdout
    refuse(*netmoe, "--phase", "decode", cwd=tmp_path, code=2, words="leave --phase out")


@pytest.fixture(scope="module")
def compared(moeplan: Any, make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two plans, their trace and another one."""
    home = tmp_path_factory.mktemp("compare")
    (home / "traces").symlink_to(make_trace(samples=80).path)
    (home / "new").symlink_to(make_trace(samples=90, seed=1).path)
    (home / "wider").symlink_to(make_trace(samples=8, experts=16).path)
    moeplan("solve", "--cluster", "2x2", "--objective", "copies", cwd=home)
    moeplan("solve", "--cluster", "2x2", "--strategy", "contiguous", "-o", "plain.json", cwd=home)
    return home


def test_a_plan_that_pays_on_new_text_ends_with_0(moeplan: Any, compared: Path) -> None:
    said = moeplan("compare", "plan.json", "--trace", "new", cwd=compared).stdout
    assert "plan.json pays:" in said
    assert "when it was solved" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


def test_one_that_does_not_ends_with_8_its_table_on_stdout_and_its_name_on_stderr(moeplan: Any, compared: Path) -> None:
    args = ("compare", "plan.json", "plain.json", "--trace", "new")
    done = moeplan(*args, cwd=compared, code=8)
    assert "plain.json does not pay: " in done.stdout
    assert done.stderr == "moeplan: new shows no benefit of plain.json; solve anew on this trace\n"
    printed = json.loads(moeplan(*args, "--json", cwd=compared, code=8).stdout)
    assert printed["no_longer_pay"] == ["plain.json"]
    assert printed["plans"][1]["against_first"]["gain"]["value"] < 0
    said = " ".join(moeplan("compare", "--help", cwd=compared).stdout.split())
    assert "Exits with 8 when at least one of the plans does not pay there" in said


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("plan.json", "--trace", "nowhere"), 3, "nowhere"),
        (("none.json", "--trace", "new"), 3, "none.json"),
        (("plan.json", "--trace", "wider"), 4, "num_experts"),
        (("plan.json", "--trace", "new", "--samples-per-step", "0"), 2, "--samples-per-step"),
        (("plan.json", "--trace", "new", "--phase", "decode"), 2, "decode"),
        (("plan.json", "--trace", "new", "--profile", "none.json"), 3, "none.json"),
        ((), 2, "Missing argument 'plans'"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_one_line(refuse: Any, compared: Path, args: Any, code: int, words: str) -> None:
    refuse("compare", *args, cwd=compared, code=code, words=words)


SEARCHED_CPU_S = 8.0  # start, a second of search on two threads, and some of the bound, which would take a minute
THOROUGH = ("--time-limit", "1", "--bound", "thorough", "--fit-fraction", "1")


@pytest.fixture(scope="module")
def loose(moeplan: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 24 experts that follow each other loosely."""
    folder, rng = tmp_path_factory.mktemp("bounded"), np.random.default_rng(1)
    ids = np.cumsum(rng.geometric(0.2, (4000, 18)), axis=1) % 24
    np.save(folder / "ids.npy", ids[:, :, None].astype(np.uint8))
    moeplan("trace", "import", "ids.npy", "-o", "traces", "--num-experts", "24", cwd=folder)
    return folder


def test_a_thorough_bound_is_proven_by_the_file_beside_the_plan(moeplan: Any, loose: Path) -> None:
    done = moeplan("solve", "--cluster", "1x8", *THOROUGH, "--verbose", cwd=loose)
    assert "three-layer bound" in " ".join(done.stdout.split())
    assert len(list(loose.glob("bound-*.safetensors"))) == 1
    done = moeplan("certify", "plan.json", "--trace", "traces", cwd=loose)
    assert "bound (by its prices)" in " ".join(done.stdout.split())


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
