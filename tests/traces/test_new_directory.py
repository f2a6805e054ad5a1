"""A directory that appears whole or not at all."""

from pathlib import Path

import pytest

from moeplan.errors import InputError, StorageError, UsageError
from moeplan.traces.new_directory import new_directory


def fail(directory: Path) -> None:
    (directory / "part").write_text("half")
    raise InputError("damaged")


def test_it_appears_when_the_block_ends_well_with_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with new_directory(tmp_path / "below" / "new") as directory:
        (directory / "part").write_text("whole")
        assert not (tmp_path / "below" / "new").exists()
    assert (tmp_path / "below" / "new" / "part").read_text() == "whole"
    assert (tmp_path / "below" / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="damaged"), new_directory(tmp_path / "new") as directory:
        fail(directory)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_taken_over_and_another_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with new_directory(tmp_path / "new") as directory:
        (directory / "part").write_text("whole")
    with pytest.raises(UsageError, match="not empty"), new_directory(tmp_path / "new"):
        pass
    assert (tmp_path / "new" / "part").read_text() == "whole"


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"), new_directory(tmp_path / "file" / "new"):
        pass
