"""Counts as arrays and as CSV: both come back cell by cell, and everything else is refused."""

import io
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError, UsageError
from moeplan.traces import loads
from moeplan.traces.importers import count_arrays, csv_counts
from moeplan.traces.importers.source import Given
from tests.traces.importers.recordings import cells_of, imported, is_said, npz, refused

KINDS = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.uint64])


@settings(max_examples=25)
@given(st.data(), KINDS)
def test_counts_by_sample_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: type) -> None:
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)))
    counts = data.draw(hnp.arrays(kind, shape, elements=st.integers(0, 200)))
    folder = tmp_path_factory.mktemp("import")
    summary = imported(folder, {"c.npz": npz(counts=counts, other=np.arange(3))}, top_k=1)
    assert cells_of(folder / "trace") == {at: count for at, count in np.ndenumerate(counts) if count}
    (pairs, *others) = counts.sum(axis=(0, 2), dtype=np.int64).tolist()
    num_tokens = pairs if all(other == pairs for other in others) else None
    assert (summary.num_tokens, summary.num_samples, summary.is_counts) == (num_tokens, shape[0], True)
    assert (summary.model.num_experts, summary.notes) == (shape[2], ("array other left out",))


@settings(max_examples=25)
@given(st.data(), KINDS, st.sampled_from([8, 4096]))
def test_counts_by_step_come_back_whatever_the_block(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: type, block_bytes: int
) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 3)] * 5))
    counts = data.draw(hnp.arrays(kind, shape, elements=st.integers(0, 200)))
    steps = data.draw(hnp.arrays(np.int64, shape[0], elements=st.integers(-5, 10**6), unique=True))
    folder = tmp_path_factory.mktemp("import")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count_arrays, "BLOCK_BYTES", block_bytes)
        summary = imported(folder, {"c.npz": npz(counts=counts, iteration=steps)}, top_k=1)
    assert summary.num_samples == shape[0] * shape[1] * shape[3]
    _, ranks, _, micro, _ = shape
    assert cells_of(folder / "trace") == {
        (int(steps[b]), (b * ranks + r) * micro + m, r, layer, expert): count
        for (b, r, layer, m, expert), count in np.ndenumerate(counts)
        if count
    }


def test_the_experts_a_token_follow_from_the_tokens_of_a_sample_where_they_are_known(tmp_path: Path) -> None:
    counts = np.array([8, 4, 2, 2])[:, None, None] * np.ones((4, 2, 3), int)
    files = {"c.npz": npz(counts=counts, n_tokens=np.array([12, 6, 3, 3]))}
    summary = imported(tmp_path, files)
    assert (summary.model.top_k, summary.num_tokens, summary.num_samples) == (2, 24, 4)
    refused(tmp_path, files, "top_k 3 asked for; the file says 2", kind=UsageError, to="other", top_k=3)


COUNTS = np.ones((4, 2, 3), np.int64)
EMPTY = COUNTS * np.array([1, 1, 0, 1])[:, None, None]
BY_STEP = np.ones((2, 2, 1, 1, 3), np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"counts": np.ones((4, 2, 3))}, "counts is float64 "),
        ({"counts": -COUNTS}, "count -1; expected 0 to"),
        ({"counts": COUNTS * 2**41}, "count 2199023255552; expected 0 to"),
        ({"counts": np.ones((1, 5000, 1), int)}, "at most 4,096 layers"),
        ({"counts": np.ones((1, 1, 65_535), int)}, "65,534 experts"),
        ({"counts": COUNTS, "n_tokens": np.ones(3, int)}, "n_tokens is int64 (3,); expected integers of shape (4,"),
        ({"counts": COUNTS, "n_tokens": np.full(4, 2)}, "sample 0 has 2 tokens and 3 to 3 counts per layer"),
        ({"counts": EMPTY, "n_tokens": np.array([3, 3, 0, 3])}, "sample 2 has 0 tokens"),
        ({"counts": BY_STEP}, "5 dimensions without iteration"),
        ({"counts": BY_STEP, "iteration": np.array([7, 7])}, "names a step twice"),
        ({"counts": BY_STEP, "iteration": np.array([7, 2**40])}, "expected int32"),
        ({"counts": BY_STEP, "iteration": np.array([7, -(2**40)])}, "expected int32"),
    ],
)
def test_arrays_of_another_layout_are_refused_in_one_line(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    refused(tmp_path, {"c.npz": npz(**arrays)}, message)


def test_an_archive_that_names_an_array_twice_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO(npz(counts=COUNTS))
    with zipfile.ZipFile(stream, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("counts.npy", archive.read("counts.npy"))
    refused(tmp_path, {"c.npz": stream.getvalue()}, "c.npz: two arrays called counts; expected one of each name")


HEADER = "layer,expert,count\n"
KEYS = ("step", "sample", "source_rank")
MOST_ROWS = 20  # whose sum is a count, too


@settings(max_examples=40)
@given(st.data(), st.sets(st.sampled_from(KEYS)), st.booleans(), st.integers(1, 50))
def test_counts_come_back_added_up_whatever_the_block(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, keys: set[str], windows: bool, most: int
) -> None:
    columns = data.draw(st.permutations([*sorted(keys), "layer", "expert", "count", "comment"]))
    value: dict[str, st.SearchStrategy[Any]] = {
        name: st.integers(0, 3) for name in ("layer", "expert", "step", "source_rank")
    }
    value |= {"sample": st.integers(-(2**63), 2**63 - 1), "comment": st.just("x y")}
    value["count"] = st.integers(0, 2**40 // MOST_ROWS)
    row_of_columns = st.fixed_dictionaries({name: value[name] for name in columns})
    rows = data.draw(st.lists(row_of_columns, min_size=1, max_size=MOST_ROWS))
    folder, end = tmp_path_factory.mktemp("import"), "\r\n" if windows else "\n"
    lines = [",".join(columns), *(",".join(str(row[name]) for name in columns) for row in rows)]
    text = ("\ufeff" if windows else "") + end.join(lines) + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MAX_BYTES", most)
        patch.setattr(csv_counts, "BLOCK_BYTES", 256)
        summary = imported(folder, {"r.csv": text.encode()}, num_experts=4, top_k=2)
    expected: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        expected[tuple(row[name] for name in (*KEYS, "layer", "expert") if name in row)] += row["count"]
    assert cells_of(folder / "trace") == {key: count for key, count in expected.items() if count}
    assert (summary.importer, summary.is_counts, summary.model.top_k) == ("csv", True, 2)
    assert summary.num_samples == (len({row["sample"] for row in rows}) if "sample" in keys else None)
    assert summary.model.layer_ids == tuple(sorted({row["layer"] for row in rows}))


def test_what_the_file_does_not_say_is_noted(tmp_path: Path) -> None:
    text = b"Layer, Expert, Count, \x1b]0;owned\x07\n3,5,1099511627776,a\n7,0,2,b\n"
    summary = imported(tmp_path, {"r.csv": text})
    assert (summary.model.num_experts, summary.model.top_k, summary.model.layer_ids) == (6, 1, (3, 7))
    assert is_said(summary, "6 taken, the largest id + 1")
    assert is_said(summary, "1 taken")
    assert is_said(summary, r"left out: \x1b]0;owned\x07")
    assert all(note.isprintable() for note in summary.notes)


def test_few_rows_that_would_become_many_counts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_counts, "FREE_CELLS", 5_000)
    monkeypatch.setattr(csv_counts, "MAX_EXPANSION", 50)
    rows = [f"0,{step},1,{step}" for step in range(100)]
    files = {"r.csv": "\n".join(["layer,expert,count,step", *rows]).encode()}
    refused(tmp_path, files, "100 rows of 100 experts are over 5,000 counts")
    monkeypatch.setattr(csv_counts, "MAX_EXPANSION", 100)
    imported(tmp_path, files)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEADER, "no counts"),
        (HEADER.strip(), "too short"),
        (HEADER + "0,1,2\n0,1\n", "Row #3"),
        (HEADER + "0,1,1.5\n", "Row #2"),
        (HEADER + "0,1,99999999999999999999\n", "Row #2"),
        (HEADER + "0,1,2\n0,1,-2\n", "row 3: count -2"),
        (HEADER + f"0,1,{2**40 + 1}\n", "row 2: count"),
        (HEADER + "0,1,2\n-1,1,2\n", "row 3: layer -1"),
        (HEADER + "0,65534,2\n", "row 2: expert 65534"),
        ("layer,expert,count,step\n0,1,2,2147483648\n", "row 2: step"),
        ("layer,expert,count,count\n0,1,2,2\n", "two columns count"),
        (HEADER + "".join(f"{layer},0,1\n" for layer in range(5000)), "layers"),
        (HEADER + '0,1,"2\n', ""),
        (HEADER + "0,1,\xff\n", "Row #2"),
        (HEADER + "0,1," + "1" * 3_000_000, "header names"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path: Path, text: str, expected: str) -> None:
    num_experts = None if "65534" in text else 4
    refused(tmp_path, {"r.csv": text.encode("latin-1")}, expected, num_experts=num_experts)


@pytest.mark.parametrize(
    ("name", "text", "missing", "header"),
    [
        ("r.csv", "layer,count\n0,1\n", "column expert;", "has layer, count,"),
        ("r.txt", "Step, count\n0,1\n", "columns layer, expert;", "has step, count,"),
        ("r.CSV", "layer;expert;count\n0;1;2\n", "columns layer, expert, count;", "has layer;expert;count,"),
        ("r.csv", "0,1,2\n", "columns layer, expert, count;", "has 0, 1, 2,"),
    ],
)
def test_a_csv_that_lacks_a_column_says_which(tmp_path: Path, name: str, text: str, missing: str, header: str) -> None:
    refused(tmp_path, {name: text.encode()}, f"without the {missing}", f"its header {header}", "expected layer, expert")


@pytest.mark.parametrize(("name", "text"), [("r.csv", ""), ("r.csv", "\x00\x01,\x02"), ("r.txt", "0,1,2\n")])
def test_other_text_is_of_no_known_kind(tmp_path: Path, name: str, text: str) -> None:
    refused(tmp_path, {name: text.encode()}, "no kind that can be imported")


def test_a_csv_that_changes_between_the_passes_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(HEADER + "0,1,2\n")
    source: Any = csv_counts.open_source(Given((tmp_path / "r.csv",)))
    (tmp_path / "r.csv").write_text(HEADER + "0,1,x\n")
    with pytest.raises(InputError):
        list(source.tables(2))
