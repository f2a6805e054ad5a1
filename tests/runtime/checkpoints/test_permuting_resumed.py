"""Runs that end early: killed, interrupted, out of disk, beside another; what is complete is kept, and gone on from."""

import json
import os
import shutil
import signal
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeplan.errors import InputError, StorageError, UsageError
from moeplan.runtime.checkpoints import partial, permute, rewriting, undo
from tests.runtime.checkpoints.made_checkpoints import (
    PLAN,
    expert_tensors,
    files_of,
    permuted_by_hand,
    permuting,
    plan_of,
    read_tensors,
    spec,
    write_checkpoint,
)

SHARDS = 4
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in four files."""
    return write_checkpoint(tmp_path / "source", expert_tensors((0, 1), 4), shards=SHARDS)


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    permute(PLAN, source, tmp_path / "undisturbed")
    return files_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT])
def test_a_run_ended_in_the_middle_goes_on_where_it_was(
    ended_by: signal.Signals, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    shards = sorted(source.glob("model-*.safetensors"))
    _end(ended_by, source, tmp_path, after=_bytes(source) - sum(file.stat().st_size for file in shards[2:]) + 100)
    assert not (tmp_path / "permuted").exists()
    complete = {file.name: file.stat().st_ino for file in (tmp_path / ".permuted.partial").glob("model-*.safetensors")}
    assert sorted(complete) == [file.name for file in shards[:2]]
    told: list[int] = []
    permute(PLAN, source, tmp_path / "permuted", on_progress=lambda done, _: told.append(done))
    assert files_of(tmp_path / "permuted") == expected
    assert not (tmp_path / ".permuted.partial").exists()
    assert {name: (tmp_path / "permuted" / name).stat().st_ino for name in complete} == complete
    assert told == sorted(told)
    assert told[-1] == sum(file.stat().st_size for file in source.iterdir())


@pytest.mark.parametrize("change", ["another plan", "another source", "another source of the same times"])
def test_what_was_begun_for_another_job_is_begun_anew(change: str, source: Path, tmp_path: Path) -> None:
    if change != "another plan":
        (source / "extra").mkdir()
        (source / "extra" / "chat.jinja").write_text("text")
    _end(signal.SIGKILL, source, tmp_path, after=_bytes(source) // 2)
    plan = PLAN
    if change == "another plan":
        plan = plan_of(spec(), [[0, 3, 1, 2]] * 2)
    else:
        times = {file.name: file.stat().st_mtime_ns for file in source.iterdir() if file.is_file()}
        shutil.rmtree(source)
        write_checkpoint(source, expert_tensors((0, 1), 4, seed=5), shards=SHARDS)
        for name in times if change.endswith("times") else ():
            os.utime(source / name, ns=(times[name], times[name]))
    permute(plan, source, tmp_path / "permuted")
    expected = permuted_by_hand(read_tensors(source), plan)
    restarted = read_tensors(tmp_path / "permuted")
    assert all((restarted[name] == tensor).all() for name, tensor in expected.items())
    assert not (tmp_path / "permuted" / "extra").exists()


@pytest.mark.parametrize("noted", ["5", '"no hash"', "null"])
def test_a_journal_that_is_damaged_is_begun_anew(
    noted: str, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    _end(signal.SIGKILL, source, tmp_path, after=_bytes(source) // 2)
    journal = tmp_path / ".permuted.partial" / partial.JOURNAL
    content = json.loads(journal.read_text())
    journal.write_text(json.dumps(content | {"done": dict.fromkeys(content["done"], json.loads(noted))}))
    permute(PLAN, source, tmp_path / "permuted")
    assert files_of(tmp_path / "permuted") == expected


@pytest.mark.parametrize("damage", ["cut", "another head"])
def test_a_complete_file_that_was_damaged_since_is_written_again(
    damage: str, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    _end(signal.SIGKILL, source, tmp_path, after=_bytes(source) // 2)
    file = min((tmp_path / ".permuted.partial").glob("model-*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-5] if damage == "cut" else content.replace(b"experts.1.", b"experts.7."))
    permute(PLAN, source, tmp_path / "permuted")
    assert files_of(tmp_path / "permuted") == expected


def test_an_undo_goes_on_too(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permute(PLAN, source, tmp_path / "permuted")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        undo(tmp_path / "permuted", tmp_path / "restored", on_progress=interrupt)
    assert list((tmp_path / ".restored.partial").glob("model-*.safetensors"))
    assert undo(tmp_path / "permuted", tmp_path / "restored").changed == ()
    assert files_of(tmp_path / "restored") == files_of(source)


def test_interrupted_before_a_file_is_complete_it_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(rewriting.Copy, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        permute(PLAN, source, tmp_path / "permuted")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_disk_too_small_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = _bytes(source) + 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, needed - 1234))
    with pytest.raises(StorageError, match=rf"{needed - 1234:,} bytes free, {needed:,} needed: 1,234 are missing"):
        permute(PLAN, source, tmp_path / "permuted")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_run_that_goes_on_needs_space_only_for_the_rest(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _end(signal.SIGKILL, source, tmp_path, after=_bytes(source) // 2)
    done = sum((source / file.name).stat().st_size for file in (tmp_path / ".permuted.partial").glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, _bytes(source) - done + 2**20))
    permute(PLAN, source, tmp_path / "permuted")


def test_a_disk_that_fills_up_keeps_what_is_complete(
    source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    last = max(source.glob("model-*.safetensors"))
    make = rewriting.Copy.make

    def filled(self: rewriting.Copy, path: Path, *args: object, **named: object) -> str:
        with monkeypatch.context() as patch:
            if path == last:
                patch.setattr(os, "fsync", full)
            return make(self, path, *args, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(rewriting.Copy, "make", filled)
        with pytest.raises(StorageError, match=r"No space left on device\); what is complete is kept in .*run again"):
            permute(PLAN, source, tmp_path / "permuted")
    permute(PLAN, source, tmp_path / "permuted")
    assert files_of(tmp_path / "permuted") == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not made or made.returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_destination_with_something_in_it_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    permute(PLAN, source, tmp_path / "there")
    before = files_of(tmp_path / "there")
    with pytest.raises(UsageError, match="already there and not empty"):
        permute(PLAN, source, tmp_path / "there")
    assert files_of(tmp_path / "there") == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        permute(PLAN, source, tmp_path / "file")
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="in the way and not ours"):
        permute(PLAN, source, tmp_path / "new")
    assert (tmp_path / ".new.partial" / "mine").read_text() == "mine"


def test_a_destination_that_could_not_appear_is_refused_before_anything_is_written(
    source: Path, small_disk: Path, tmp_path: Path
) -> None:
    before = files_of(tmp_path)
    with pytest.raises(UsageError, match="a disk is mounted there; choose a new directory on it"):
        permute(PLAN, source, small_disk)
    with pytest.raises(UsageError, match=r"inside .*source, which is read"):
        permute(PLAN, source, source / "planned")
    assert files_of(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_a_destination_that_is_a_link_to_an_empty_directory_is_filled(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    permute(PLAN, source, tmp_path / "link")
    assert files_of(tmp_path / "empty") == expected
    assert not list(tmp_path.glob(".*"))


def test_a_kill_at_the_very_end_leaves_nothing_to_do_or_something_to_go_on_from(
    source: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(KeyboardInterrupt):
        pass

    def killed(self: Path, target: Path) -> Path:
        if Path(target).name == "permuted":
            raise Killed
        os.replace(self, target)
        return Path(target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        patch.setattr(partial, "_keep", lambda _: "")
        with pytest.raises(Killed):
            permute(PLAN, source, tmp_path / "permuted")
    permute(PLAN, source, tmp_path / "permuted")
    assert files_of(tmp_path / "permuted") == expected


def test_two_processes_do_not_write_the_same_checkpoint(source: Path, tmp_path: Path) -> None:
    with partial.filling(tmp_path / "permuted", "another"), pytest.raises(UsageError, match="another process"):
        permute(PLAN, source, tmp_path / "permuted")


@pytest.mark.parametrize(("when", "words"), [("before", "damaged"), ("within", "changed while it was read")])
def test_a_source_that_shrinks_while_it_is_read_is_refused_and_nothing_written(
    when: str, words: str, source: Path, tmp_path: Path
) -> None:
    last = max(source.glob("model-*.safetensors"))
    size = last.stat().st_size

    def shrink(done: int, total: int) -> None:
        if when == "before" or done > total - 0.9 * size:
            os.truncate(last, size // 4)

    with pytest.raises(InputError, match=words):
        permute(PLAN, source, tmp_path / "permuted", on_progress=shrink)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_source_that_is_replaced_while_it_is_read_is_refused_and_nothing_kept(source: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", expert_tensors((0, 1), 4, seed=5), shards=SHARDS)

    def replace(done: int, total: int) -> None:
        for file in other.iterdir():
            shutil.move(file, source / file.name)

    with pytest.raises(InputError, match="changed while it was read; nothing was kept"):
        permute(PLAN, source, tmp_path / "permuted", on_progress=replace)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "source"]


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _end(ended_by: signal.Signals, source: Path, tmp_path: Path, *, after: int) -> None:
    """Begin to permute into `permuted` and end the process once so many bytes are written."""
    with permuting(PLAN, source, tmp_path / "permuted", "", after) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        child.send_signal(ended_by)
        child.wait(timeout=30)
