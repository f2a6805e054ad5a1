"""Runs that end early, beside others or without room: what is complete is kept and gone on from; and their memory."""

import json
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import InputError, StorageError, UsageError
from moeplan.files import sha256_file
from moeplan.runtime.checkpoints import partial, permute, rewriting, undo
from moeplan.runtime.checkpoints.header import packed
from moeplan.runtime.plan import Plan
from tests.builders import known
from tests.runtime.checkpoints.made_checkpoints import (
    CONFIG,
    INDEX,
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
    if change == "another source":
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


def _cut(folder: Path) -> None:
    file = min(folder.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


def _with_another_head(folder: Path) -> None:
    file = min(folder.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b"experts.1.", b"experts.7."))


def _noting(value: str) -> Callable[[Path], None]:
    def note(folder: Path) -> None:
        content = json.loads((folder / partial.JOURNAL).read_text())
        noted = dict.fromkeys(content["done"], json.loads(value))
        (folder / partial.JOURNAL).write_text(json.dumps(content | {"done": noted}))

    return note


@pytest.mark.parametrize("damage", [_cut, _with_another_head, *map(_noting, ("5", '"no hash"', "null"))])
def test_what_was_damaged_since_it_was_complete_or_noted_is_written_again(
    damage: Callable[[Path], None], source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    _end(signal.SIGKILL, source, tmp_path, after=_bytes(source) // 2)
    damage(tmp_path / ".permuted.partial")
    permute(PLAN, source, tmp_path / "permuted")
    assert files_of(tmp_path / "permuted") == expected


def test_an_undo_goes_on_too_and_leaves_nothing_before_a_file_is_complete(source: Path, tmp_path: Path) -> None:
    permute(PLAN, source, tmp_path / "permuted")

    def interrupt_at(share: float) -> Callable[[int, int], None]:
        def interrupt(done: int, total: int) -> None:
            if done > total * share:
                raise KeyboardInterrupt

        return interrupt

    for share in (0.0, 0.5):
        with pytest.raises(KeyboardInterrupt) as raised:
            undo(tmp_path / "permuted", tmp_path / "restored", on_progress=interrupt_at(share))
        kept = f"what is complete is kept in {tmp_path / '.restored.partial'}: run again to go on"
        assert raised.value.__notes__ == [kept]
        assert bool([*(tmp_path / ".restored.partial").glob("model-*.safetensors")]) == (share > 0)
    assert undo(tmp_path / "permuted", tmp_path / "restored").changed == ()
    assert files_of(tmp_path / "restored") == files_of(source)


def test_a_disk_too_small_is_refused_unless_the_rest_of_a_run_fits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = _bytes(source) + 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, needed - 1))
    with pytest.raises(StorageError, match=rf"{needed - 1:,} bytes free, {needed:,} needed: 1 are missing"):
        permute(PLAN, source, tmp_path / "permuted")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
    _end(signal.SIGKILL, source, tmp_path, after=_bytes(source) // 2)
    done = sum((source / file.name).stat().st_size for file in (tmp_path / ".permuted.partial").glob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, needed - done))
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


def test_a_link_to_an_empty_directory_is_filled_and_a_full_one_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "there").symlink_to("empty")
    permute(PLAN, source, tmp_path / "there")
    assert not list(tmp_path.glob(".*"))
    before = files_of(tmp_path / "empty")
    assert INDEX in before
    with pytest.raises(UsageError, match="already there and not empty"):
        permute(PLAN, source, tmp_path / "there")
    assert files_of(tmp_path / "empty") == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        permute(PLAN, source, tmp_path / "file")
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="in the way and not ours"):
        permute(PLAN, source, tmp_path / "new")
    assert (tmp_path / ".new.partial" / "mine").read_text() == "mine"


def test_a_destination_that_could_not_appear_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, disk = files_of(tmp_path), tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == disk)
    with pytest.raises(UsageError, match="a disk is mounted there; choose a new directory on it"):
        permute(PLAN, source, disk)
    with pytest.raises(UsageError, match=r"inside .*source, which is read"):
        permute(PLAN, source, source / "planned")
    assert files_of(tmp_path) == before
    assert not list(tmp_path.glob(".*"))


def test_a_kill_at_the_very_end_leaves_something_to_go_on_from(
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


@pytest.mark.parametrize("when", ["before", "within", "replaced"])
def test_a_source_that_changes_while_it_is_read_is_refused_whole(when: str, source: Path, tmp_path: Path) -> None:
    last = max(source.glob("model-*.safetensors"))
    other = write_checkpoint(tmp_path / "other", expert_tensors((0, 1), 4, seed=5), shards=SHARDS)
    size = last.stat().st_size

    def change(done: int, total: int) -> None:
        if when == "replaced":
            for file in other.iterdir():
                shutil.move(file, source / file.name)
        elif when == "before" or done > total - 0.9 * size:
            os.truncate(last, size // 4)

    with pytest.raises(InputError, match="damaged" if when == "before" else "changed while it was read"):
        permute(PLAN, source, tmp_path / "permuted", on_progress=change)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "source"]


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _end(ended_by: signal.Signals, source: Path, tmp_path: Path, *, after: int) -> None:
    """Begin to permute into `permuted` and end the process once so many bytes are written."""
    with permuting(PLAN, source, tmp_path / "permuted", "", after) as child:
        assert known(child.stdout).readline() == "there\n"
        child.send_signal(ended_by)
        child.wait(timeout=30)


LIMIT_MIB = 256
ROW_BYTES = 80 * 2**20
ROW = [2, 0, 3, 1]
STACKED = {"model.layers.0.mlp.experts.down_proj": ("BF16", [4, 8]), "model.layers.0.mlp.gate.weight": ("F32", [4, 8])}


def test_a_tensor_larger_than_the_memory_allowed_is_permuted_and_undone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tensors = STACKED | {"model.layers.0.mlp.experts.down_proj": ("BF16", [4, ROW_BYTES // 2])}
    _write(source, tensors, CONFIG | {"num_hidden_layers": 1})
    start = (source / "model.safetensors").stat().st_size - 4 * ROW_BYTES - 128
    with open(source / "model.safetensors", "r+b") as stream:
        for expert in range(4):
            stream.seek(start + expert * ROW_BYTES)
            stream.write(bytes([expert + 1]) * 9)
    plan = plan_of(spec(4, (0,)), [ROW])
    assert _peak_mib(plan, source, tmp_path / "permuted", tmp_path / "restored") < LIMIT_MIB
    heads = []
    with open(tmp_path / "permuted" / "model.safetensors", "rb") as stream:
        for expert in range(4):
            stream.seek(start + expert * ROW_BYTES)
            heads.append(stream.read(9))
    assert heads == [bytes([old + 1]) * 9 for old in known(plan.placement).physical_to_logical[0]]
    assert sha256_file(tmp_path / "restored" / "model.safetensors") == sha256_file(source / "model.safetensors")


def test_thirty_thousand_tensors_in_a_file_take_less_than_half_of_it(tmp_path: Path) -> None:
    layers, num_experts = 20, 256
    tensors: dict[str, tuple[str, list[int]]] = {}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = ("F32", [num_experts, 1])
        for expert in range(num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                tensors |= {stem: ("F8_E4M3", [1, 8]), f"{stem}_scale_inv": ("F32", [1, 1])}
    config = CONFIG | {"num_hidden_layers": layers, "num_experts": num_experts}
    _write(tmp_path / "source", tensors, config)
    rng = np.random.default_rng(0)
    plan = plan_of(spec(num_experts, range(layers)), [rng.permutation(num_experts).tolist() for _ in range(layers)])
    assert _peak_mib(plan, tmp_path / "source", tmp_path / "permuted") < LIMIT_MIB / 2


def test_a_long_text_among_the_metadata_takes_no_more_than_a_few_copies_of_it(tmp_path: Path) -> None:
    _write(tmp_path / "source", STACKED, CONFIG | {"num_hidden_layers": 1}, note='x"\\' * 2**21)
    assert _peak_mib(plan_of(spec(4, (0,)), [ROW]), tmp_path / "source", tmp_path / "permuted") < LIMIT_MIB


def _write(folder: Path, tensors: dict[str, tuple[str, list[int]]], config: dict[str, object], note: str = "") -> None:
    """A checkpoint of one sparse file."""
    folder.mkdir()
    described: dict[str, dict[str, object]] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + int(np.prod(shape)) * {"F32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    described["__metadata__"] = {"note": note}
    head = packed(json.dumps(described, separators=(",", ":")))
    (folder / "model.safetensors").write_bytes(head)
    os.truncate(folder / "model.safetensors", len(head) + end)
    (folder / "config.json").write_text(json.dumps(config))


def _peak_mib(plan: Plan, source: Path, *targets: Path) -> float:
    with permuting(plan, source, *targets) as child:
        return float(child.communicate()[0])
