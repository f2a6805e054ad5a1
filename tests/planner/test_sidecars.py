"""The files beside a plan: there with it, nothing left where it cannot be written, gone when it is replaced."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moeplan.errors import StorageError
from tests.planner.makers import edited
from tests.planner.makers import made as make


@pytest.fixture(scope="module")
def plans(make_trace: Any) -> list[Any]:
    """Two plans with predictors of their own."""
    return [make(make_trace(samples=48, seed=seed), "netmoe", samples_per_step=8) for seed in (0, 1)]


@pytest.fixture
def made(plans: list[Any]) -> Any:
    return plans[0]


@pytest.fixture
def saved(plans: list[Any], tmp_path: Path) -> tuple[Any, Any, Path]:
    """A plan that is saved, another one, and where the first is."""
    plans[0].save(tmp_path / "plan.json")
    return *plans, tmp_path / "plan.json"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["", "file/plan.json", "/proc/plan.json"])
def test_where_the_plan_cannot_be_its_predictor_is_not_either(made: Any, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as told:
        made.save(tmp_path / place)
    assert str(told.value).startswith(str(tmp_path / place))
    assert names(tmp_path) == {"file"}
    assert not list(tmp_path.parent.glob("predictor-*"))


@pytest.mark.parametrize("failing", ["plan.json", "predictor"])
def test_a_write_that_fails_half_way_leaves_what_was_there(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    (tmp_path / "plan.json").write_text("the old plan")
    rename = Path.replace

    def refusing(self: Path, target: Path) -> Path:
        if target.name.startswith(failing):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", refusing)
    with pytest.raises(StorageError, match="No space left on device") as told:
        made.save(tmp_path / "plan.json")
    assert str(told.value).startswith(f"{tmp_path / 'plan.json'}: ")
    assert names(tmp_path) == {"plan.json"}
    assert (tmp_path / "plan.json").read_text() == "the old plan"


def test_an_interruption_once_the_plan_is_there_leaves_its_predictor(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        rename(self, target)
        if target.name == "plan.json":
            raise KeyboardInterrupt
        return target

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.save(tmp_path / "plan.json")
    assert names(tmp_path) == {"plan.json", *made.sidecars}


def test_a_predictor_that_was_there_survives_a_failed_write(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, path = saved
    monkeypatch.setattr("moeplan.planner.sidecars.save", Mock(side_effect=StorageError("full")))
    with pytest.raises(StorageError, match="full"):
        made.save(path)
    assert names(path.parent) == {"plan.json", *made.sidecars}


def test_a_replaced_plans_predictor_goes_with_it_unless_another_plan_names_it(saved: Any, tmp_path: Path) -> None:
    made, other, path = saved
    made.save(path)
    assert names(tmp_path) == {"plan.json", *made.sidecars}
    other.save(path)
    assert names(tmp_path) == {"plan.json", *other.sidecars}
    shutil.copyfile(path, tmp_path / "copy")
    made.save(path)
    assert names(tmp_path) == {"plan.json", "copy", *made.sidecars, *other.sidecars}


def test_a_plan_that_names_another_file_of_the_folder_does_not_take_it_along(saved: Any, tmp_path: Path) -> None:
    made, other, path = saved
    (contents,) = made.sidecars.values()
    forged = edited(made.plan, "decisions.sample_policy.predictor.file", "thesis.bin")
    replace(made, plan=forged, sidecars={"thesis.bin": contents}).save(path)
    other.save(path)
    assert (tmp_path / "thesis.bin").read_bytes() == contents


def test_what_is_not_as_solve_wrote_it_stays(saved: Any, tmp_path: Path) -> None:
    made, other, path = saved
    (name,) = made.sidecars
    (tmp_path / name).write_bytes(b"somebody else's")
    other.save(path)
    assert (tmp_path / name).read_bytes() == b"somebody else's"
