"""EPLB and NetMoE on the command line: counts weighed, planned, certified, drawn, compared; homes on a placement."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.runtime.active import load_plan
from moeplan.traces.reader import Trace
from tests.planner.makers import tallied

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_counts_are_weighed_planned_certified_and_drawn(moeplan: Run, tmp_path: Path) -> None:
    tallied(tmp_path / "counts", hidden_size=64, ffn_size=96, dtype_bytes=2)
    solve = ("solve", "--strategy", "eplb", "--trace", "counts")
    solved = moeplan(*solve, "--cluster", "2x2", "--redundant", "auto", "-v", cwd=tmp_path).stdout
    for words in (
        "MB/device",
        "(chosen)",
        "less load on the busiest device than today",
    ):
        assert words in solved
    assert all(len(line) <= 80 for line in solved.splitlines())
    certified = moeplan("certify", "plan.json", "--trace", "counts", cwd=tmp_path).stdout
    assert "objective" in certified
    assert "wrote" in moeplan("show", "plan.json", "-o", "weighed.html", cwd=tmp_path).stdout
    assert "redundant experts per layer" in (tmp_path / "weighed.html").read_text()
    wishes = ("--dead", "1", "--pin", "3@0", "--pin", "5@2", "--redundant", "5", "--quantile", "0.9", "--json")
    found = json.loads(moeplan(*solve, "--cluster", "1x4", *wishes, "-o", "other.json", cwd=tmp_path).stdout)
    assert found["options"]["placement"]["pins"] == [[3, 0], [5, 2]]
    assert found["outcome"]["placement"]["objective"]["name"] == "step_balance_p90"
    placement = json.loads((tmp_path / "other.json").read_text())["decisions"]["placement"]
    assert placement["slots_per_device"] == [7, 0, 7, 7]


def test_traces_are_mixed_by_their_weights(moeplan: Run, tmp_path: Path) -> None:
    for seed in (1, 2):
        tallied(tmp_path / f"t{seed}", seed=seed)
    mixed = ("--trace", "t1:0.7", "--trace", "t2:0.3", "--cluster", "1x4", "--redundant", "4")
    said = moeplan("solve", "--strategy", "eplb", *mixed, cwd=tmp_path).stdout
    assert "weighted means over traces: t1 70%, t2 30%" in said.replace("\n", " ")


def test_plans_are_compared_as_an_engine_replays_them_with_a_page_of_bytes(
    moeplan: Run, make_trace: Callable[..., Trace], tmp_path: Path
) -> None:
    trace, new = (make_trace(samples=96, seed=seed).path for seed in (1, 2))
    for name, extra in (("a.json", 0), ("b.json", 8)):
        moeplan(
            *("solve", "--strategy", "eplb", "--trace", trace, "--cluster", "2x2", "--redundant", extra, "-o", name),
            cwd=tmp_path,
        )
    flags: tuple[Any, ...] = ("--trace", new, "--replica-rule", "static", "-o", "bytes.html")
    done = moeplan("compare", "a.json", "b.json", *flags, cwd=tmp_path)
    assert "a fixed one for each device" in done.stdout
    assert "experts move" in done.stdout
    assert (tmp_path / "bytes.html").read_text().count("<h2>") == 4


def test_placement_then_homes_then_certified_then_applied(
    moeplan: Run, make_trace: Callable[..., Trace], tmp_path: Path
) -> None:
    trace = make_trace(samples=96, tokens=6, top_k=1, seed=3).path
    moeplan(
        *("solve", "--strategy", "exflow", "--dispatch", "standard", "--trace", trace, "--cluster", "2x2"),
        *("--time-limit", "5", "-o", "base.json"),
        cwd=tmp_path,
    )
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
    refused = moeplan("certify", "plan.json", "--trace", trace, cwd=tmp_path, code=5).stderr
    assert "has hash" in refused
    assert refused.count("\n") == 1


def test_counts_are_imported_planned_and_certified(moeplan: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = np.array([[rng.multinomial(64, p)] * 3 for p in rng.dirichlet(np.full(8, 0.4), 96)])
    np.savez(tmp_path / "c.npz", counts=counts, n_tokens=np.full(96, 32))
    moeplan("trace", "import", "c.npz", "-o", "t", "--hidden-size", "64", "--dtype-bytes", "2", cwd=tmp_path)
    solved = moeplan("solve", "--strategy", "netmoe", "--trace", "t", "--cluster", "2x2", "--json", cwd=tmp_path).stdout
    found = json.loads(solved)
    assert found["verdict"]["value"] == "benefit"
    assert found["options"]["sample_policy"]["copies"] == "pairs"
    assert "verdict" in moeplan("certify", "plan.json", "--trace", "t", cwd=tmp_path).stdout
    refused = moeplan(
        *("solve", "--strategy", "netmoe", "--trace", "t", "--cluster", "2x2", "--phase", "decode"),
        cwd=tmp_path,
        code=2,
    ).stderr
    assert "leave --phase out" in refused
    assert refused.strip().count("\n") == 0
