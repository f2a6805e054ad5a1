"""Counts, loads and splits against plain loops; the count form, and traces at URIs: round trips and refusals."""

import dataclasses
import hashlib
import itertools
from collections import Counter as Tally
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
from moeplan.traces import dataset, loads
from moeplan.traces.count_form import CountTable, condense, open_any, read_counts, tabulate, write_counts
from moeplan.traces.counts import Counter, Pairs, count
from moeplan.traces.loads import Distinct, distinct_rows, grouped_loads
from moeplan.traces.model import ModelSpec
from moeplan.traces.part_file import local_directory
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import PHASES, Key, TokenBatch
from moeplan.traces.split import BLOCK_ROWS, fitted, mixed, units, with_units
from moeplan.traces.writer import TraceWriter
from tests.builders import known, meta_of, model
from tests.traces.builders import COUNTS_META, META, MakeTrace, make_batch

L, E, DROPPED = 3, 6, 65_535


def naive(batch: TokenBatch, pairs: Pairs, rows: Any = None) -> tuple[Any, Any, Any]:
    """Loads, transitions and co-activation, token by token."""
    loads, transitions, together = np.zeros((L, E)), np.zeros((L - 1, E, E)), np.zeros((L, E, E))
    for token in range(len(batch)) if rows is None else np.flatnonzero(rows):
        for layer in range(L):
            cells = batch.ids[token, layer].tolist()
            for expert, times in Tally(cells).items():
                if expert != DROPPED:
                    loads[layer, expert] += times
            for i in range(len(cells)):
                for j in range(len(cells)):
                    if i != j and DROPPED not in (cells[i], cells[j]):
                        together[layer, cells[i], cells[j]] += 1
                    if layer and (i == 0 or pairs in ("all", "weighted")) and (j == 0 or pairs != "top1"):
                        a, b = int(batch.ids[token, layer - 1, i]), cells[j]
                        assert batch.weights is not None
                        gate = float(batch.weights[token, layer - 1, i]) * float(batch.weights[token, layer, j])
                        if DROPPED not in (a, b):
                            transitions[layer - 1, a, b] += gate if pairs == "weighted" else 1
    return loads, transitions, together


@pytest.mark.parametrize("pairs", ["top1", "first", "all", "weighted"])
def test_counts_are_those_of_plain_loops(make_trace: MakeTrace, pairs: Pairs) -> None:
    batch = make_batch(300, top_k=3)
    counts = count(make_trace(batch, top_k=3), pairs=pairs, coactivation=True)
    loads, transitions, together = naive(batch, pairs)
    np.testing.assert_array_equal(counts.loads, loads)
    np.testing.assert_allclose(counts.transitions, transitions, rtol=1e-12)
    np.testing.assert_array_equal(counts.coactivation, together)
    assert counts.num_tokens == 300
    assert counts.transitions.dtype == (np.float64 if pairs == "weighted" else np.int64)
    assert counts.loads.shape == (L, E)


@pytest.mark.parametrize("known", [("sample",), ("step",), ()])
def test_only_kept_units_are_counted(make_trace: MakeTrace, known: tuple[str, ...]) -> None:
    batch = make_batch(900, known=known)
    unit_T = batch.sample if "sample" in known else batch.step if "step" in known else np.arange(900) // BLOCK_ROWS
    assert unit_T is not None
    counts = count(make_trace(batch), keep=lambda unit_U: unit_U % 2 == 0)
    rows = unit_T % 2 == 0
    np.testing.assert_array_equal(counts.transitions, naive(batch, "top1", rows)[1])
    assert counts.num_tokens == rows.sum()


def test_only_the_phases_asked_for_are_counted(make_trace: MakeTrace) -> None:
    batch = make_batch(300)
    counts = count(make_trace(batch), phases=["decode"])
    rows = batch.phase == PHASES.index("decode")
    np.testing.assert_array_equal(counts.loads, naive(batch, "top1", rows)[0])


def test_counts_of_parts_add_up_to_those_of_the_whole(make_trace: MakeTrace) -> None:
    batches = [make_batch(100, seed=seed) for seed in range(3)]
    whole = make_trace(*batches)
    parts = [count(make_trace(batch, name=f"part{i}"), coactivation=True) for i, batch in enumerate(batches)]
    total, together = parts[0] + parts[1] + parts[2], count(whole, coactivation=True)
    np.testing.assert_array_equal(total.transitions, together.transitions)
    np.testing.assert_array_equal(total.loads, together.loads)
    np.testing.assert_array_equal(total.coactivation, together.coactivation)
    assert total.num_tokens == together.num_tokens


def test_counts_of_other_shapes_do_not_add(make_trace: MakeTrace) -> None:
    trace = make_trace(make_batch(10))
    with pytest.raises(ValueError, match="counts of shapes"):
        count(trace) + count(trace, coactivation=True)


def test_weighing_needs_recorded_weights(make_trace: MakeTrace) -> None:
    with pytest.raises(UsageError, match="weights were not recorded"):
        count(make_trace(make_batch(10), weights=False), pairs="weighted")


def test_tables_of_an_absurd_size_are_refused_before_they_are_made() -> None:
    model = ModelSpec(name="hostile", layer_ids=tuple(range(4096)), num_experts=65_534, top_k=1)
    with pytest.raises(UsageError, match="GiB"):
        Counter(model)


ALL: tuple[Key, ...] = ("step", "sample", "source_rank")


@pytest.mark.parametrize("rows", [10, 10_000])
@pytest.mark.parametrize("by", [(), *((name,) for name in ALL), ALL])
def test_loads_by_columns_are_those_of_plain_loops_by_ascending_key_added_up_over_pieces(
    make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch, by: tuple[Key, ...], rows: int
) -> None:
    monkeypatch.setattr(loads, "MAX_BYTES", rows * L * E * 8)
    batch, added = make_batch(400, known=ALL), dict[tuple[int, ...], Any]()
    for piece in grouped_loads(make_trace(batch), by):
        keys = list(map(tuple, piece.keys.tolist()))
        assert keys == sorted({*keys})
        assert len(keys) <= rows
        for key, table in zip(keys, piece.counts, strict=True):
            added[key] = added.get(key, 0) + table
    key_T = list(zip(*(getattr(batch, name).tolist() for name in by), strict=True)) if by else [()] * len(batch)
    assert added.keys() == {*key_T}
    for key, table in added.items():
        np.testing.assert_array_equal(table, naive(batch, "top1", np.array([key == other for other in key_T]))[0])


def test_a_column_that_was_not_recorded_is_refused_by_name(make_trace: MakeTrace) -> None:
    with pytest.raises(UsageError, match="step"):
        list(grouped_loads(make_trace(make_batch(10)), ("step",)))


def total(tables: list[CountTable]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for table in tables:
        assert table.step is None
        for sample, layer, counts in zip(known(table.sample), table.layer, table.counts, strict=True):
            row = found.setdefault((int(sample), int(layer)), [0] * 6)
            found[int(sample), int(layer)] = [a + b for a, b in zip(row, counts.tolist(), strict=True)]
    return found


@pytest.mark.parametrize("most_rows", [1, 4, 10_000])
def test_rows_of_equal_keys_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    rng = np.random.default_rng(0)
    sample_R, layer_R = rng.integers(-3, 4, (3, 50)), rng.integers(0, 3, (3, 50)).astype(np.int32)
    counts_RE = rng.integers(0, 9, (3, 50, 6))
    tables = [CountTable(sample=sample_R[i], layer=layer_R[i], counts=counts_RE[i]) for i in range(3)]
    write_counts(tmp_path / "counts", COUNTS_META, tables)
    monkeypatch.setattr(loads, "MAX_BYTES", most_rows * 8 * 6)
    found = list(condense(read_counts(tmp_path / "counts")))
    assert total(found) == total(tables)
    assert max(map(len, found)) <= most_rows
    if most_rows == 10_000:
        (table,) = found
        keys = list(zip(known(table.sample).tolist(), table.layer.tolist(), strict=True))
        assert keys == sorted({*keys})


VALUES = hnp.arrays(np.int64, st.integers(0, 30), elements=st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5))
ROWS = hnp.arrays(
    np.int64,
    st.tuples(st.integers(0, 12), st.integers(0, 3)),
    elements=st.integers(0, 2) | st.sampled_from([-(2**63), 2**63 - 1]),
)


@given(ROWS)
def test_different_rows_are_those_of_a_set_in_ascending_order(table: np.ndarray) -> None:
    found, place = distinct_rows(table)
    assert list(map(tuple, found.tolist())) == sorted(set(map(tuple, table.tolist())))
    np.testing.assert_array_equal(found[place], table)


@given(st.lists(VALUES, max_size=8), st.integers(0, 40))
def test_as_many_values_are_counted_as_a_set_holds(batches: list[np.ndarray], pending: int) -> None:
    found = Distinct()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MIN_PENDING", pending)
        for batch in batches:
            found.add(batch)
        assert len(found) == len({value for batch in batches for value in batch.tolist()})


def test_what_waits_is_bounded_by_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MIN_PENDING", 100)
    found = Distinct()
    for first in range(0, 100_000, 50):
        found.add(np.arange(first, first + 50) % 1000)
        assert found._num_pending <= 1000 + 50
    assert len(found) == 1000


@pytest.mark.parametrize("known", [("sample",), ("step",), ()])
def test_units_do_not_depend_on_how_a_trace_is_cut(known: tuple[str, ...]) -> None:
    whole = make_batch(1000, known=known)
    pieces = [whole.select(slice(start, start + 77)) for start in range(0, 1000, 77)]
    found = np.concatenate([unit for _, unit in with_units(pieces)])
    np.testing.assert_array_equal(found, units(whole, 0) if known else np.arange(1000) // BLOCK_ROWS)


def hash_of(unit: int, seed: int) -> float:
    """The published hash of a unit over 2^64."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{unit}".encode()).digest()[:8], "big") / 2**64


def test_a_unit_is_fitted_by_the_published_hash() -> None:
    ids = np.array([0, 1, -5, 2**40 + 3, *range(2, 20)])
    for seed, fraction in ((0, 0.5), (7, 0.2)):
        expected = [hash_of(unit, seed) < fraction for unit in ids.tolist()]
        assert 0 < sum(expected) < len(ids)
        assert fitted(ids, seed=seed, fraction=fraction).tolist() == expected


def test_of_few_units_some_are_fitted_and_some_held_out() -> None:
    for number, seed in itertools.product((2, 3, 4), range(20)):
        hashes = [hash_of(unit, seed) for unit in range(number)]
        kept = fitted(np.arange(number), seed=seed, fraction=0.5)
        assert kept[np.argmin(hashes)]
        assert not kept[np.argmax(hashes)]
        assert ((kept == (np.array(hashes) < 0.5)) | (kept.sum() == 1) | (kept.sum() == number - 1)).all()
    assert fitted(np.arange(1), seed=0, fraction=0.5).tolist() == [hash_of(0, 0) < 0.5]
    assert fitted(np.arange(3), seed=0, fraction=1.0).all()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_the_hash_of_a_sample_is_the_first_output_of_splitmix64_for_that_seed(ids: list[int]) -> None:
    expected = []
    for seed in ids:
        z = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        expected.append(z ^ z >> 31)
    assert mixed(np.array(ids, np.int64)).tolist() == expected


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
