"""The count form: from tokens, round trips, refusals."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError, UsageError
from moeplan.traces.count_form import CountTable, read_counts, tabulate, write_counts
from moeplan.traces.counts import count
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch, TraceMeta

Make = Callable[..., TokenBatch]
MakeTrace = Callable[..., Trace]


@pytest.fixture
def counts_meta(meta: TraceMeta) -> TraceMeta:
    return meta.model_copy(update={"form": "counts"})


def table_of(rows: int, seed: int = 0) -> CountTable:
    rng = np.random.default_rng(seed)
    layer = rng.integers(0, 3, rows).astype(np.int32)
    return CountTable(sample=rng.integers(0, 9, rows), layer=layer, counts=rng.integers(0, 99, (rows, 6)))


def test_tabulated_counts_add_up_to_the_loads(
    make_trace: MakeTrace, make_batch: Make, tmp_path: Path, counts_meta: TraceMeta
) -> None:
    trace = make_trace(make_batch(300, known=("step", "sample")))
    write_counts(tmp_path / "counts", counts_meta, tabulate(trace))
    written = read_counts(tmp_path / "counts")
    loads = np.zeros((3, 6), np.int64)
    for table in written.tables():
        np.add.at(loads, table.layer, table.counts)
    np.testing.assert_array_equal(loads, count(trace).loads)
    assert written.known == {"step", "sample"}


def test_tabulating_a_trace_without_keys_gives_one_row_a_layer(make_trace: MakeTrace, make_batch: Make) -> None:
    trace = make_trace(make_batch(300, known=()))
    (table,) = tabulate(trace)
    assert table.sample is None
    assert table.layer.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(table.counts, count(trace).loads)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.booleans(), st.data())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: int, stepped: bool, data: st.DataObject
) -> None:
    from moeplan.traces.model import ModelSpec

    meta = TraceMeta(
        form="counts", model=ModelSpec(name="x", layer_ids=(0, 5), num_experts=3, top_k=1), recorder="test"
    )
    table = CountTable(
        step=data.draw(hnp.arrays(np.int32, rows)) if stepped else None,
        layer=data.draw(hnp.arrays(np.int32, rows, elements=st.integers(0, 1))),
        counts=data.draw(hnp.arrays(np.int64, (rows, 3), elements=st.integers(0, 2**62))),
    )
    directory = tmp_path_factory.mktemp("counts")
    write_counts(directory, meta, [table])
    trace = read_counts(directory)
    (read,) = trace.tables()
    assert trace.meta == meta
    for field in dataclasses.fields(CountTable):
        written, found = getattr(table, field.name), getattr(read, field.name)
        assert (written is None) == (found is None)
        if written is not None:
            np.testing.assert_array_equal(found, written)


def test_each_form_is_refused_by_the_reader_of_the_other(
    make_trace: MakeTrace, make_batch: Make, tmp_path: Path, counts_meta: TraceMeta
) -> None:
    tokens = make_trace(make_batch(10))
    write_counts(tmp_path / "counts", counts_meta, [table_of(5)])
    with pytest.raises(InputError, match=r"form counts; expected the form tokens; .*that they were counted from"):
        open_trace(tmp_path / "counts")
    with pytest.raises(InputError, match="form tokens; expected the form counts; moeplan trace count"):
        read_counts(tokens.path)


def test_a_bad_table_takes_back_those_before_it(tmp_path: Path, counts_meta: TraceMeta) -> None:
    bad = dataclasses.replace(table_of(5), counts=np.full((5, 6), -1))
    with pytest.raises(InputError, match="negative count"):
        write_counts(tmp_path, counts_meta, [table_of(5), bad])
    assert list(tmp_path.iterdir()) == []


def test_counts_are_not_written_over_counts(tmp_path: Path, counts_meta: TraceMeta) -> None:
    write_counts(tmp_path, counts_meta, [table_of(5)])
    with pytest.raises(UsageError, match="not empty"):
        write_counts(tmp_path, counts_meta, [table_of(5)])
    assert read_counts(tmp_path).num_rows == 5


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("layer", pa.array([3] * 5, pa.int32()), "layer outside"),
        ("layer", pa.array([None] * 5, pa.int32()), "nulls"),
        ("counts", pa.array([[-1] * 6] * 5, pa.list_(pa.int64(), 6)), "negative count"),
        ("counts", pa.array([[1] * 7] * 5, pa.list_(pa.int64(), 7)), "column counts is"),
        ("counts", pa.array([None] * 5, pa.list_(pa.int64(), 6)), "nulls"),
        ("counts", pa.array([[None] * 6] * 5, pa.list_(pa.int64(), 6)), "nulls"),
        ("counts", pa.array([[1.0] * 6] * 5, pa.list_(pa.float64(), 6)), "column counts is"),
        ("sample", pa.array([1, None, 1, 1, 1], pa.int64()), "nulls"),
    ],
)
def test_malformed_counts_are_one_clear_line(
    tmp_path: Path, counts_meta: TraceMeta, name: str, values: Any, expected: str
) -> None:
    (path,) = write_counts(tmp_path, counts_meta, [table_of(5)])
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)
    with pytest.raises(InputError, match=expected) as refused:
        list(read_counts(tmp_path).tables())
    assert "\n" not in str(refused.value)
