"""Files: what appears, appears whole; what is read, is looked at first; what is refused, is refused in one line."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from moeplan.errors import InputError, MoeplanError, StorageError, UsageError, printable
from moeplan.files import (
    atomic_directory,
    atomic_path,
    canonical_json,
    check_target,
    read_json,
    read_text,
    size_of,
    validated,
    write_json,
)

Appearing = Callable[[Path], AbstractContextManager[Path]]
KINDS: dict[str, tuple[Appearing, Callable[[Path], Path]]] = {
    "file": (atomic_path, lambda temporary: temporary),
    "directory": (atomic_directory, lambda temporary: temporary / "part"),
}
both = pytest.mark.parametrize("kind", KINDS)


@both
def test_it_appears_below_missing_parents_when_the_block_ends_well(tmp_path: Path, kind: str) -> None:
    appearing, inside = KINDS[kind]
    target = tmp_path / "a" / "b" / "new"
    with appearing(target) as temporary:
        inside(temporary).write_text("whole")
        assert not target.exists()
        assert temporary.parent == target.parent
    assert inside(target).read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


@both
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_its_permissions_are_the_usual_ones(tmp_path: Path, kind: str, mask: int) -> None:
    appearing, inside = KINDS[kind]
    before = os.umask(mask)
    try:
        with appearing(tmp_path / "new") as temporary:
            inside(temporary).touch()
        (tmp_path / "usual").touch() if kind == "file" else (tmp_path / "usual").mkdir()
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


@both
@pytest.mark.parametrize("fault", [InputError("damaged"), KeyboardInterrupt()])
def test_an_error_or_ctrl_c_in_the_block_leaves_nothing(tmp_path: Path, kind: str, fault: BaseException) -> None:
    appearing, inside = KINDS[kind]
    with contextlib.suppress(type(fault)), appearing(tmp_path / "new") as temporary:
        inside(temporary).write_text("half")
        raise fault
    assert list(tmp_path.iterdir()) == []


@both
def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "new", tmp_path / ("x" * 300)):
        with pytest.raises(StorageError, match="cannot be written"), KINDS[kind][0](target):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_target_that_is_no_place_for_a_file_is_refused_before_the_work_and_after_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("folder", "no regular file"),
        ("pipe", "no regular file"),
        ("file/new", "."),
        ("x" * 300, "."),
    ):
        with pytest.raises(StorageError, match=words) as early:
            check_target(tmp_path / name)
        with pytest.raises(StorageError) as late:
            write_json(tmp_path / name, 1)
        assert str(early.value).split("(")[0] == str(late.value).split("(")[0]
    for name in ("file", "new", "missing/folders/new"):
        check_target(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "pipe"]
    assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "pipe").is_fifo()


def test_an_empty_directory_is_taken_over_and_anything_else_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with atomic_directory(tmp_path / "new") as directory:
        (directory / "part").write_text("whole")
    (tmp_path / "file").write_text("old")
    for name in ("new", "file"):
        with pytest.raises(UsageError, match=r"not empty|no directory"), atomic_directory(tmp_path / name):
            pass
    assert (tmp_path / "new" / "part").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from moeplan.errors import StorageError
from moeplan.files import atomic_directory, write_json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
def in_directory(target):
    with atomic_directory(target) as directory:
        write_json(directory / "small", 1)
        write_json(directory / "large", "x" * 10_000)
large = "x" * 10_000
Path("there/yet").mkdir(parents=True)
for attempt in (
    lambda: write_json("plan.json", large),
    lambda: in_directory(Path("new")),
    lambda: write_json("there/yet/not/yet/large", large),
    lambda: in_directory(Path("there/not")),
):
    try:
        attempt()
    except StorageError as error:
        print(error)
"""


def test_a_full_disk_leaves_the_old_file_and_no_half_written_one_and_names_the_final_one(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("old")
    told = subprocess.check_output([sys.executable, "-c", FULL_DISK], cwd=tmp_path, text=True, timeout=60).splitlines()
    assert [line.partition(": ")[0] for line in told] == [
        "plan.json",
        "new/large",
        "there/yet/not/yet/large",
        "there/not/large",
    ]
    assert all(os.strerror(errno.EFBIG) in line for line in told)
    assert (tmp_path / "plan.json").read_text() == "old"
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"plan.json", "there", "there/yet"}


def test_a_full_disk_is_named_whatever_words_the_writer_has_for_it(tmp_path: Path) -> None:
    arrow = OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")
    with pytest.raises(StorageError) as refused, atomic_path(tmp_path / "new"):
        raise arrow
    assert str(refused.value) == f"{tmp_path}/new: cannot be written (No space left on device); nothing was changed"


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_place_where_no_file_can_be_made_is_refused_with_its_reason_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(reason, os.strerror(reason))))
    for directory in (False, True):
        with pytest.raises(StorageError) as refused:
            check_target(tmp_path / "new", directory=directory)
        assert str(refused.value) == f"{tmp_path}/new: cannot be written ({os.strerror(reason)})"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=VALUES)
def test_json_reads_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_json(path, value)
    assert read_json(path, what="a value") == value
    path.write_bytes(canonical_json(value))
    assert read_json(path, what="a value") == value


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "truncated": (b'{"a": [1, 2', "its end is missing"),
    "many digits": (b"[" + b"7" * 5000 + b"]", "a number of 5,000 digits, expected at most 64"),
    "two values": (b"1 2", "Extra data"),
    "NaN": (b'{"a": NaN}', "NaN is not a finite number"),
    "infinity": (b"[-Infinity]", "-Infinity is not a finite number"),
    "beyond floats": (b"[1e999]", "1e999 is not a finite number"),
    "a key twice": (b'[{"b": {"a": 1, "a": 2}}]', "names a key twice"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "a BOM": (b"\xef\xbb\xbf{}", "BOM"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    "a control character": (b'"a\x1b[2J"', "control character"),
    "too large": (b" " * 200_001, "200,001 bytes, expected a plan of at most 200,000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none_of_ours_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, told = BAD_JSON[name]
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_json(path, what="a plan", max_bytes=max(200_000, len(content) * (name != "too large")))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert told in message
    assert message.isprintable()
    assert len(message) - len(str(path)) < 200


@pytest.mark.parametrize("name", ["missing", "folder", "pipe", "/dev/zero", "null\0byte"])
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for read in (size_of, partial(read_text, max_bytes=10), read_json):
        with pytest.raises(InputError, match="cannot be read as a plan") as caught:
            read(tmp_path / name, what="a plan")
        assert str(caught.value).isprintable()


@dataclass(frozen=True)
class Inner:
    """A value that refuses 0 in our own words."""

    count: int

    def __post_init__(self) -> None:
        if not self.count:
            raise UsageError("count 0\x1b[2J; expected more " + "and more " * 99)


class Choice(BaseModel):
    """A model with a union, a version and a rule of ours."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[3] = 3
    size: int = 1
    nested: dict[str, Inner] | int = 0


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "not a choice: value: "),
    "another version": ({"schema_version": 4}, "a choice of schema version 4; this moeplan reads 3"),
    "a version without end": ({"schema_version": "9" * 10**5}, "a choice of schema version '999"),
    "text for a number": ({"size": "1"}, "not a choice: size: "),
    "true for a number": ({"size": True}, "not a choice: size: "),
    "deep in a union": ({"nested": {"a": {"count": "x"}}}, "a.count: "),
    "a rule of ours": ({"nested": {"a": {"count": 0}}}, "count 0\\x1b[2J; expected"),
    "a key that steers terminals": ({"\x1b]0;owned\x07\n" * 9999: 1}, "not a choice: \\x1b]0;owned\\x07 \\x1b"),
    "many problems": ({str(i): 1 for i in range(500)}, "(500 problems)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_of_another_shape_is_refused_in_one_line(name: str) -> None:
    value, told = REFUSED[name]
    for form in (value, json.dumps(value).encode()):
        if "nested" in value and form is value:
            continue  # strict: decoded, a dataclass would have to be one already
        with pytest.raises(InputError) as caught:
            validated(Choice, form, source="file.json", what="a choice")
        message = str(caught.value)
        assert message.startswith("file.json: ")
        assert told in message
        assert message.isprintable()
        assert len(message) < 450


def test_a_value_of_the_right_shape_is_the_model() -> None:
    value = json.dumps({"size": 2, "nested": {"a": {"count": 1}}}).encode()
    assert validated(Choice, value, source="f", what="a choice") == Choice(size=2, nested={"a": Inner(1)})
    assert validated(Choice, {"size": 2}, source="f", what="a choice") == Choice(size=2)


@given(text=st.text())
def test_no_text_makes_an_error_steer_a_terminal_or_break_its_line(text: str) -> None:
    assert str(MoeplanError(text)).isprintable()
    assert printable(printable(text)) == printable(text)
    if text.isprintable():
        assert str(MoeplanError(text)) == text


def test_a_lone_surrogate_of_an_undecodable_file_name_can_be_printed() -> None:
    assert str(InputError(os.fsdecode(b"a\xff"))).encode() == b"a\\udcff"
