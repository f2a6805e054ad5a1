"""NetMoE on the command line: a placement, homes on top of it, certified, applied; counts; refusals of one line."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeplan.runtime.active import load_plan
from moeplan.traces.reader import Trace

Run = Callable[..., "subprocess.CompletedProcess[str]"]


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
    assert "not the plan's" in refused
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
