"""`moeplan compare` as typed: its screen, its JSON, and the exit code for a plan that does not pay."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def folder(fresh_moeplan: Any, make_trace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two plans, their trace and another one."""
    home = tmp_path_factory.mktemp("compare")
    (home / "traces").symlink_to(make_trace(samples=80).path)
    (home / "new").symlink_to(make_trace(samples=90, seed=1).path)
    (home / "wider").symlink_to(make_trace(samples=8, experts=16).path)
    fresh_moeplan("solve", "--cluster", "2x2", "--objective", "copies", cwd=home)
    fresh_moeplan("solve", "--cluster", "2x2", "--strategy", "contiguous", "-o", "plain.json", cwd=home)
    return home


def test_a_plan_that_pays_on_new_text_ends_with_0(moeplan: Any, folder: Path) -> None:
    said = moeplan("compare", "plan.json", "--trace", "new", cwd=folder).stdout
    assert "plan.json pays:" in said
    assert "when it was solved" in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


def test_one_that_does_not_ends_with_8_its_table_on_stdout_and_its_name_on_stderr(moeplan: Any, folder: Path) -> None:
    done = moeplan("compare", "plan.json", "plain.json", "--trace", "new", cwd=folder, code=8)
    assert "plain.json does not pay: " in done.stdout
    assert done.stderr == "moeplan: new shows no benefit of plain.json; solve anew on this trace\n"
    found = json.loads(
        moeplan("compare", "plan.json", "plain.json", "--trace", "new", "--json", cwd=folder, code=8).stdout
    )
    assert found["no_longer_pay"] == ["plain.json"]
    assert found["plans"][1]["against_first"]["gain"]["value"] < 0


def test_its_help_says_when_it_ends_with_8(moeplan: Any, folder: Path) -> None:
    said = " ".join(moeplan("compare", "--help", cwd=folder).stdout.split())
    assert "Exits with 8 when at least one of the plans does not pay there" in said


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("plan.json", "--trace", "nowhere"), 3, "nowhere"),
        (("none.json", "--trace", "new"), 3, "none.json"),
        (("plan.json", "--trace", "wider"), 4, "num_experts"),
        (("plan.json", "--trace", "new", "--samples-per-step", "0"), 2, "samples-per-step"),
        (("plan.json", "--trace", "new", "--phase", "decode"), 2, "decode"),
        (("plan.json", "--trace", "new", "--profile", "none.json"), 3, "none.json"),
        ((), 2, "PLANS"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(moeplan: Any, folder: Path, args: tuple[str, ...], code: int, words: str) -> None:
    done = moeplan("compare", *args, cwd=folder, code=code)
    assert words.lower() in done.stderr.lower()
    assert done.stderr.count("\n") == 1
    assert not done.stdout
