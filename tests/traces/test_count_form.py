"""The count form, and traces at URIs: round trips and refusals."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pyarrow import fs

from moeplan.errors import InputError, UsageError
from moeplan.traces import dataset
from moeplan.traces.count_form import CountTable, open_any, read_counts, tabulate, write_counts
from moeplan.traces.counts import count
from moeplan.traces.part_file import local_directory
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.writer import TraceWriter
from tests.builders import meta_of, model
from tests.traces.builders import COUNTS_META, META, MakeTrace, make_batch


def table_of(rows: int, seed: int = 0) -> CountTable:
    rng = np.random.default_rng(seed)
    layer = rng.integers(0, 3, rows).astype(np.int32)
    return CountTable(sample=rng.integers(0, 9, rows), layer=layer, counts=rng.integers(0, 99, (rows, 6)))


@pytest.mark.parametrize("keys", [(), ("step", "sample")])
def test_tabulated_counts_add_up_to_the_loads(make_trace: MakeTrace, tmp_path: Path, keys: tuple[str, ...]) -> None:
    trace = make_trace(make_batch(300, known=keys))
    write_counts(tmp_path / "counts", COUNTS_META, tabulate(trace))
    written = read_counts(tmp_path / "counts")
    loads = np.zeros((3, 6), np.int64)
    for table in written.tables():
        np.add.at(loads, table.layer, table.counts)
    np.testing.assert_array_equal(loads, count(trace).loads)
    assert written.known == {*keys}
    assert keys or written.num_rows == 3


@settings(max_examples=30)
@given(st.integers(1, 30), st.booleans(), st.data())
def test_the_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: int, stepped: bool, data: st.DataObject
) -> None:
    meta = meta_of(model(2, 3, 1, layer_ids=(0, 5)), form="counts")
    table = CountTable(
        step=data.draw(hnp.arrays(np.int32, rows)) if stepped else None,
        layer=data.draw(hnp.arrays(np.int32, rows, elements=st.integers(0, 1))),
        counts=data.draw(hnp.arrays(np.int64, (rows, 3), elements=st.integers(0, 2**40))),
    )
    directory = tmp_path_factory.mktemp("counts")
    write_counts(directory, meta, [table])
    trace = read_counts(directory)
    (read,) = trace.tables()
    assert trace.meta == meta
    for field in dataclasses.fields(CountTable):
        np.testing.assert_array_equal(getattr(read, field.name), getattr(table, field.name))


def test_each_form_is_refused_by_the_reader_of_the_other(make_trace: MakeTrace, tmp_path: Path) -> None:
    tokens = make_trace(make_batch(10))
    write_counts(tmp_path / "counts", COUNTS_META, [table_of(5)])
    with pytest.raises(InputError, match=r"form counts; expected the form tokens; .*that they were counted from"):
        open_trace(tmp_path / "counts")
    with pytest.raises(InputError, match="form tokens; expected the form counts; moeplan trace count"):
        read_counts(tokens.path)


def test_counts_are_not_written_over_counts_and_a_bad_table_takes_back_those_before_it(tmp_path: Path) -> None:
    bad = dataclasses.replace(table_of(5), counts=np.full((5, 6), -1))
    with pytest.raises(InputError, match="negative count"):
        write_counts(tmp_path, COUNTS_META, [table_of(5), bad])
    assert list(tmp_path.iterdir()) == []
    write_counts(tmp_path, COUNTS_META, [table_of(5)])
    with pytest.raises(UsageError, match="not empty"):
        write_counts(tmp_path, COUNTS_META, [table_of(5)])
    assert read_counts(tmp_path).num_rows == 5


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("layer", pa.array([3] * 5, pa.int32()), "layer outside"),
        ("counts", pa.array([[-1] * 6] * 5, pa.list_(pa.int64(), 6)), "negative count"),
        ("counts", pa.array([[2**40 + 1] * 6] * 5, pa.list_(pa.int64(), 6)), "count above 1,099,511,627,776"),
        ("counts", pa.array([[1] * 7] * 5, pa.list_(pa.int64(), 7)), "column counts is"),
        ("counts", pa.array([None] * 5, pa.list_(pa.int64(), 6)), "nulls"),
        ("counts", pa.array([[None] * 6] * 5, pa.list_(pa.int64(), 6)), "nulls"),
        ("sample", pa.array([1, None, 1, 1, 1], pa.int64()), "nulls"),
    ],
)
def test_malformed_counts_are_one_clear_line(tmp_path: Path, name: str, values: Any, expected: str) -> None:
    (path,) = write_counts(tmp_path, COUNTS_META, [table_of(5)])
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)
    with pytest.raises(InputError, match=expected) as refused:
        list(read_counts(tmp_path).tables())
    assert "\n" not in str(refused.value)


def test_a_file_uri_is_read_and_written_like_its_directory(tmp_path: Path) -> None:
    uri = (tmp_path / "a trace").as_uri()
    assert "%20" in uri
    with TraceWriter(uri, META) as writer:
        writer.append(make_batch(50))
    assert open_trace(uri).sha256 == open_trace(tmp_path / "a trace").sha256
    assert count(open_trace(uri)).num_tokens == 50
    assert isinstance(open_any(uri), Trace)
    write_counts((tmp_path / "counts").as_uri(), COUNTS_META, tabulate(open_trace(uri)))
    assert sum(table.counts.sum() for table in read_counts((tmp_path / "counts").as_uri()).tables())
    assert open_any(tmp_path / "counts").form == "counts"


def test_a_trace_in_another_file_system_is_read(make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace(make_batch(30), make_batch(20, seed=1))
    far = fs.SubTreeFileSystem(str(Path(trace.path).parent), fs.LocalFileSystem())
    names = sorted(part.name for part in Path(trace.path).iterdir())
    monkeypatch.setattr(dataset, "_listing", lambda _: (far, "trace", names))
    found = open_trace("far://bucket/trace")
    assert found.sha256 == trace.sha256
    assert count(found).num_tokens == 50


@pytest.mark.parametrize("uri", ["s3://bucket/traces", "hdfs://host/traces", "file://host/traces"])
def test_a_place_not_local_is_no_destination(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="written to local ones only"):
        TraceWriter(uri, META)
    with pytest.raises(UsageError, match="file:///DIRECTORY"):
        write_counts(uri, COUNTS_META, [])
    assert not list(tmp_path.iterdir())


def test_plain_paths_are_left_as_they_are() -> None:
    assert local_directory("file:name") == Path("file:name")
    assert local_directory(Path("/a/b")) == Path("/a/b")
