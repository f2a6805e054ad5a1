"""The importer of counts as CSV: round trips, added-up rows, and hostile content, each refused by its row."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError
from moeplan.traces import loads
from moeplan.traces.importers import csv_counts
from moeplan.traces.importers.source import Given
from tests.traces.importers.recordings import cells_of, imported, is_said, refused

HEADER = "layer,expert,count\n"
KEYS = ("step", "sample", "source_rank")


@settings(deadline=None, max_examples=40)
@given(st.data(), st.sets(st.sampled_from(KEYS)), st.booleans(), st.integers(1, 50))
def test_counts_come_back_added_up(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, keys: set[str], windows: bool, most: int
) -> None:
    columns = data.draw(st.permutations([*sorted(keys), "layer", "expert", "count", "comment"]))
    value: dict[str, st.SearchStrategy[Any]] = {
        name: st.integers(0, 3) for name in ("layer", "expert", "step", "source_rank")
    }
    value |= {"count": st.integers(0, 2**40), "sample": st.integers(-(2**63), 2**63 - 1), "comment": st.just("x y")}
    rows = data.draw(st.lists(st.fixed_dictionaries({name: value[name] for name in columns}), min_size=1, max_size=20))
    folder, end = tmp_path_factory.mktemp("import"), "\r\n" if windows else "\n"
    lines = [",".join(columns), *(",".join(str(row[name]) for name in columns) for row in rows)]
    text = ("\ufeff" if windows else "") + end.join(lines) + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MAX_BYTES", most)
        summary = imported(folder, {"r.csv": text.encode()}, num_experts=4, top_k=2)
    expected: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        expected[tuple(row[name] for name in (*KEYS, "layer", "expert") if name in row)] += row["count"]
    assert cells_of(folder / "trace") == {key: count for key, count in expected.items() if count}
    assert (summary.importer, summary.is_counts, summary.model.top_k) == ("csv", True, 2)
    assert summary.num_samples == (len({row["sample"] for row in rows}) if "sample" in keys else None)
    assert summary.model.layer_ids == tuple(sorted({row["layer"] for row in rows}))


def test_what_the_file_does_not_say_is_noted(tmp_path: Path) -> None:
    summary = imported(tmp_path, {"r.csv": b"Layer, Expert, Count, host\n3,5,1099511627776,a\n7,0,2,b\n"})
    assert (summary.model.num_experts, summary.model.top_k, summary.model.layer_ids) == (6, 1, (3, 7))
    assert is_said(summary, "6 taken, the largest id + 1")
    assert is_said(summary, "1 taken")
    assert is_said(summary, "left out: host")


def test_blocks_smaller_than_the_file_give_the_same_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 5, (400, 3))
    monkeypatch.setattr(csv_counts, "BLOCK_BYTES", 64)
    imported(tmp_path, {"r.csv": (HEADER + "".join(f"{a},{b},{c}\n" for a, b, c in rows)).encode()})
    expected: Counter[tuple[int, ...]] = Counter()
    for a, b, c in rows.tolist():
        expected[a, b] += c
    assert cells_of(tmp_path / "trace") == {key: count for key, count in expected.items() if count}


def test_names_of_columns_that_steer_a_terminal_are_escaped_in_the_notes(tmp_path: Path) -> None:
    summary = imported(tmp_path, {"r.csv": b"layer,expert,count,\x1b]0;owned\x07\n0,1,2,x\n"})
    assert is_said(summary, r"left out: \x1b]0;owned\x07")
    assert all(note.isprintable() for note in summary.notes)


def test_few_rows_that_would_become_a_great_many_counts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (HEADER + "\n\n", "no counts"),
        (HEADER + "0,1,2\n0,1\n", "Row #3"),
        (HEADER + "0,1,2\n0,1,2,3\n", "Row #3"),
        (HEADER + "0,1,2\n0,1,\n", "Row #3"),
        (HEADER + "0,1,nan\n", "Row #2"),
        (HEADER + "0,1,1e3\n", "Row #2"),
        (HEADER + "0,1,true\n", "Row #2"),
        (HEADER + "0,1,1.5\n", "Row #2"),
        (HEADER + "0,1,99999999999999999999\n", "Row #2"),
        (HEADER + "0,1,2\n0,1,-2\n", "row 3: count -2"),
        (HEADER + f"0,1,{2**40 + 1}\n", "row 2: count"),
        (HEADER + "0,1,2\n-1,1,2\n", "row 3: layer -1"),
        (HEADER + "0,65534,2\n", "row 2: expert 65534"),
        (HEADER + "0,7,2\n", "expert 7; expected 0 to 3"),
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


@pytest.mark.parametrize("text", ["layer;expert;count\n0;1;2\n", "layer,count\n0,1\n", "0,1,2\n", ""])
def test_other_text_is_of_no_known_kind(tmp_path: Path, text: str) -> None:
    refused(tmp_path, {"r.csv": text.encode()}, "no kind that can be imported")


def test_a_csv_that_changes_between_the_passes_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text(HEADER + "0,1,2\n")
    source: Any = csv_counts.open_source(Given((tmp_path / "r.csv",)))
    (tmp_path / "r.csv").write_text(HEADER + "0,1,x\n")
    with pytest.raises(InputError):
        list(source.tables(2))
