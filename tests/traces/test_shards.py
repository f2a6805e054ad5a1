"""Shards: what processes without a scheduler count of a trace is what one counts, or a line says what is missing."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.traces import dataset
from moeplan.traces.count_form import condense, meta_of_counts, tabulate, write_counts
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.shards import Shard, is_sharded, read_shards, write_shard
from moeplan.traces.statistics import describe
from tests.traces.builders import MakeTrace, make_batch

KNOWN = ("step", "sample", "source_rank")


@pytest.fixture
def trace(make_trace: MakeTrace) -> Trace:
    return make_trace(*(make_batch(100 + 40 * seed, seed=seed, known=KNOWN) for seed in range(7)))


def summed(folder: Path, out: Path) -> list[bytes]:
    shards = read_shards(str(folder))
    return [path.read_bytes() for path in write_counts(out, shards[0].meta, condense(*shards))]


@pytest.mark.parametrize("count", [1, 3, 7, 20])
@pytest.mark.parametrize("phases", [None, ["train"]])
def test_shards_sum_to_the_counts_of_the_whole(trace: Trace, tmp_path: Path, count: int, phases: Any) -> None:
    rows = 0
    for number in range(count):
        part, _ = write_shard(trace, Shard(number, count), str(tmp_path / "shards"), phases=phases)
        rows += part.num_rows
    whole = write_counts(tmp_path / "whole", meta_of_counts(trace), tabulate(trace, phases=phases))
    assert rows == trace.num_rows
    assert is_sharded(str(tmp_path / "shards"))
    assert summed(tmp_path / "shards", tmp_path / "sum") == [path.read_bytes() for path in whole]


def test_shards_are_of_about_as_many_rows(trace: Trace) -> None:
    rows = [Shard(number, 3).part_of(trace).num_rows for number in range(3)]
    assert max(abs(each - trace.num_rows / 3) for each in rows) < max(stamp.num_rows for stamp in trace.stamps)


def test_a_shard_that_is_there_is_not_counted_again(trace: Trace, tmp_path: Path) -> None:
    _, first = write_shard(trace, Shard(0, 2), str(tmp_path))
    times = [path.stat().st_mtime_ns for path in first]
    _, again = write_shard(trace, Shard(0, 2), str(tmp_path))
    assert [path.stat().st_mtime_ns for path in again] == times


def test_a_missing_shard_is_named(trace: Trace, tmp_path: Path) -> None:
    for number in (0, 2):
        write_shard(trace, Shard(number, 3), str(tmp_path))
    with pytest.raises(InputError, match=r"2 shards of 3, 1 is missing.*--shard-of 1/3"):
        read_shards(str(tmp_path))


@pytest.mark.parametrize("lost", ["counts/part", "parts"])
def test_a_shard_that_was_not_copied_whole_is_named(trace: Trace, tmp_path: Path, lost: str) -> None:
    for number in range(3):
        write_shard(trace, Shard(number, 3), str(tmp_path))
    (shard,) = tmp_path.glob("shard-1-of-3-*")
    for path in shard.glob(f"{lost}*"):
        path.unlink()
    for again in (lambda: read_shards(str(tmp_path)), lambda: write_shard(trace, Shard(1, 3), str(tmp_path))):
        with pytest.raises(InputError, match=rf"{shard.name}: \d parts of counts, (\d|unknown) were written"):
            again()


@pytest.mark.parametrize("second", ["shard-01-of-3", "shard-7-of-3", "shard-\u0663-of-3"])
def test_a_shard_under_a_second_name_counts_once(trace: Trace, tmp_path: Path, second: str) -> None:
    shards = tmp_path / "shards"
    for number in range(3):
        write_shard(trace, Shard(number, 3), str(shards))
    alone = summed(shards, tmp_path / "sum")
    (first,) = shards.glob("shard-1-of-3-*")
    shutil.copytree(first, shards / first.name.replace("shard-1-of-3", second))
    with pytest.raises(InputError, match="is none of 3 shards") if "7" in second else contextlib.nullcontext():
        assert summed(shards, tmp_path / "again") == alone


def test_shards_of_two_traces_are_refused(trace: Trace, tmp_path: Path) -> None:
    for number, one in enumerate((trace, trace.of_parts(0, 5))):
        write_shard(one, Shard(number, 2), str(tmp_path / "shards"))
    with pytest.raises(MismatchError, match="shards of 2 countings"):
        read_shards(str(tmp_path / "shards"))


def test_shards_of_several_countings_are_refused(trace: Trace, tmp_path: Path) -> None:
    write_shard(trace, Shard(0, 2), str(tmp_path))
    write_shard(trace, Shard(1, 2), str(tmp_path), phases=["decode"])
    with pytest.raises(MismatchError, match="shards of 2 countings"):
        read_shards(str(tmp_path))


def test_shards_without_any_token_are_refused(make_trace: MakeTrace, tmp_path: Path) -> None:
    batch = make_batch(50)
    batch.phase[:] = 0
    write_shard(make_trace(batch), Shard(0, 1), str(tmp_path / "shards"), phases=["train"])
    with pytest.raises(InputError, match="no tokens in any of 1 shards"):
        read_shards(str(tmp_path / "shards"))


@pytest.mark.parametrize("text", ["3/3", "1", "a/b", "-1/2", "0/0", "1/2/3"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--shard-of {text}; expected K/N"):
        Shard.parse(text)


def test_the_shard_is_that_of_the_process_in_srun() -> None:
    assert Shard.of_slurm({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) == Shard(3, 8)
    with pytest.raises(UsageError, match="--shard without SLURM_PROCID in the environment; expected a start by srun"):
        Shard.of_slurm({})


# Parts that change meanwhile


def changed(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("read", [describe, lambda trace: list(tabulate(trace)), lambda trace: trace.sha256])
def test_a_part_that_changes_or_vanishes_after_it_was_opened_is_one_line(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    monkeypatch.setattr(dataset, "RUN_VALUES", 1)
    first, last = (Path(trace.folder) / trace.files[place] for place in (0, -1))
    before = last.read_bytes()
    changed(last, first)
    with pytest.raises(InputError, match=rf"{last.name}: changed since the trace was opened .*run again"):
        read(trace)
    last.unlink()
    with pytest.raises(InputError, match=f"{last.name}: cannot be read as a trace"):
        read(open_trace(trace.path) if last.exists() else trace)
    last.write_bytes(before)
    os.utime(last, ns=(0, 0))
    with pytest.raises(InputError, match="changed since"):
        read(trace)
