"""Figures are saved with the commit that they are of."""

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.__main__ as driver
from benchmarks.result import SAVED, commit, refuse_changes
from moeplan.errors import UsageError

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit: a module and a saved result."""
    (tmp_path / SAVED).mkdir(parents=True)
    for path in ("solver.py", f"{SAVED}/made.json"):
        (tmp_path / path).write_text("1")
    for args in (("init", "-q"), ("add", "."), (*IDENTITY, "commit", "-q", "--no-gpg-sign", "-m", "one")):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    return tmp_path


def test_saved_results_are_no_changes(checkout: Path) -> None:
    (checkout / SAVED / "made.json").write_text("2")
    (checkout / SAVED / "other.json").write_text("3")
    refuse_changes(checkout)
    assert len(commit(checkout)) == 12


@pytest.mark.parametrize("name", ["solver.py", "new.py"])
def test_changed_and_new_files_are_refused_and_marked(checkout: Path, name: str) -> None:
    (checkout / name).write_text("2")
    with pytest.raises(UsageError, match=rf"uncommitted changes \({name}\); .* none outside {SAVED}"):
        refuse_changes(checkout)
    assert commit(checkout)[12:] == "+"


def test_of_many_changes_three_are_named_in_one_line(checkout: Path) -> None:
    for at in range(5):
        (checkout / f"{at}.py").write_text("")
    with pytest.raises(UsageError, match=r"uncommitted changes \(0.py, 1.py, 2.py and 2 more\)") as caught:
        refuse_changes(checkout)
    assert "\n" not in str(caught.value)


def test_without_a_commit_nothing_is_saved(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"
    with pytest.raises(UsageError, match="has no git commit"):
        refuse_changes(tmp_path)


def test_the_driver_refuses_to_save_before_it_runs_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkout: Path
) -> None:
    (checkout / "solver.py").write_text("2")
    monkeypatch.setattr(driver, "refuse_changes", lambda: refuse_changes(checkout))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "netmoe", "--save"])
    assert driver.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --save with uncommitted changes (solver.py)")
    assert err.count("\n") == 1
