"""`moeplan solve --strategy luffy --condense` as a user calls it."""

import json
from pathlib import Path

from moeplan.planner.demo.text import other_text
from tests.planner.cli.conftest import Run


def test_a_user_records_condenses_and_shows(moeplan: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(other_text()[:640], encoding="utf-8")
    record = ("trace", "record", "embedded", "--text", "text.txt", "--sample-tokens", "16")
    moeplan(*record, "--weights", "--embeddings", "all", cwd=tmp_path)
    solve = ("solve", "--strategy", "luffy", "--cluster", "2x2", "--samples-per-step", "16")
    said = moeplan(*solve, "--condense", "0.3", cwd=tmp_path).stdout
    assert "RESULTS CHANGE" in said
    assert "error not known" in said
    assert "benefit" not in said
    by_model = ("--model", "embedded", "--text", "text.txt", "--condense-error", "0.1", "--condense-schedule", "0.5")
    moeplan(*solve, *by_model, "-o", "by-model.json", cwd=tmp_path)
    decision = json.loads((tmp_path / "by-model.json").read_text())["decisions"]["condensation"]
    assert (decision["schedule"], decision["target"]) == ("share", 0.5)
    shown = " ".join(moeplan("show", "by-model.json", "-v", cwd=tmp_path).stdout.split())
    assert "bits of loss per token" in shown
    assert "second experts dropped" in shown
    assert "gives other results" in moeplan("compare", "by-model.json", cwd=tmp_path, code=2).stderr
    assert "only moeplan solve counts them" in moeplan("certify", "by-model.json", cwd=tmp_path, code=3).stderr


def test_bad_input_is_one_line(moeplan: Run, tmp_path: Path) -> None:
    for flags, message in (
        (("--condense", "-1"), "expected an error of at least 0"),
        (("--condense-error", "1"), "expected a share from 0 to below 1"),
        (("--condense", "0.5", "--condense-history", "0.3:0.9"), "S1 above S2"),
        (("--condense", "0", "--condense-schedule", "0.5"), "condenses nothing for a share to start from"),
        (("--condense", "0.5", "--condense-schedule", "1.0"), "a share of the rows from 0 to below 1"),
    ):
        said = moeplan("solve", "--strategy", "luffy", "--cluster", "2x2", *flags, cwd=tmp_path, code=2).stderr
        assert message in said
        assert said.count("\n") == 1
