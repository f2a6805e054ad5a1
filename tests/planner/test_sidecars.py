"""The files beside a plan: there with it, nothing left where it cannot be written, gone when it is replaced."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import StorageError
from tests.planner.makers import edited
from tests.planner.makers import made as make


@pytest.fixture(scope="module")
def made(make_trace: Any) -> Any:
    """A plan with a predictor."""
    return make(make_trace(samples=48), "netmoe", samples_per_step=8)


@pytest.fixture(scope="module")
def other(make_trace: Any) -> Any:
    return make(make_trace(samples=48, seed=1), "netmoe", samples_per_step=8)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("place", ["", "file/plan.json", "/proc/plan.json"])
def test_where_the_plan_cannot_be_its_predictor_is_not_either_and_the_error_names_what_was_asked_for(
    made: Any, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as told:
        made.save(tmp_path / place)
    assert str(told.value).startswith(str(tmp_path / place))
    assert names(tmp_path) == {"file"}
    assert not list(tmp_path.parent.glob("predictor-*"))


@pytest.mark.parametrize("failing", ["plan.json", "predictor"])
def test_a_write_that_fails_half_way_leaves_what_was_there(
    made: Any, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
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
    replaced = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        done = replaced(self, target)
        if target.name == "plan.json":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.save(tmp_path / "plan.json")
    assert names(tmp_path) == {"plan.json", *made.sidecars}


def test_a_predictor_that_was_there_survives_a_failed_write(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.save(tmp_path / "plan.json")
    before = names(tmp_path)
    monkeypatch.setattr("moeplan.planner.sidecars.save", lambda *_: (_ for _ in ()).throw(StorageError("full")))
    with pytest.raises(StorageError, match="full"):
        made.save(tmp_path / "plan.json")
    assert names(tmp_path) == before


def test_a_replaced_plans_predictor_goes_with_it(made: Any, other: Any, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    made.save(tmp_path / "plan.json")
    assert names(tmp_path) == {"plan.json", *made.sidecars}
    other.save(tmp_path / "plan.json")
    assert names(tmp_path) == {"plan.json", *other.sidecars}


def test_a_predictor_that_another_plan_names_stays(made: Any, other: Any, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    shutil.copyfile(tmp_path / "plan.json", tmp_path / "copy")
    other.save(tmp_path / "plan.json")
    assert names(tmp_path) == {"plan.json", "copy", *made.sidecars, *other.sidecars}


def test_a_plan_that_names_another_file_of_the_folder_does_not_take_it_along(
    made: Any, other: Any, tmp_path: Path
) -> None:
    (contents,) = made.sidecars.values()
    forged = edited(made.plan, "decisions.sample_policy.predictor.file", "thesis.bin")
    replace(made, plan=forged, sidecars={"thesis.bin": contents}).save(tmp_path / "plan.json")
    other.save(tmp_path / "plan.json")
    assert (tmp_path / "thesis.bin").read_bytes() == contents


def test_what_is_not_as_solve_wrote_it_stays(made: Any, other: Any, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    (name,) = made.sidecars
    (tmp_path / name).write_bytes(b"somebody else's")
    other.save(tmp_path / "plan.json")
    assert (tmp_path / name).read_bytes() == b"somebody else's"
