"""Loads by step, sample and source rank against plain loops; rows added up, and different values, against sets."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import UsageError
from moeplan.traces import loads
from moeplan.traces.count_form import CountTable, condense, read_counts, write_counts
from moeplan.traces.loads import Distinct, distinct_rows, grouped_loads
from moeplan.traces.reader import Trace
from moeplan.traces.schema import Key, TokenBatch, TraceMeta

Make = Callable[..., TokenBatch]
MakeTrace = Callable[..., Trace]
ALL: tuple[Key, ...] = ("step", "sample", "source_rank")


def naive(batch: TokenBatch, by: tuple[str, ...]) -> dict[tuple[int, ...], np.ndarray]:
    found: dict[tuple[int, ...], np.ndarray] = {}
    for token in range(len(batch)):
        key = tuple(int(getattr(batch, name)[token]) for name in by)
        table = found.setdefault(key, np.zeros((3, 6), np.int64))
        for layer in range(3):
            for expert in batch.ids[token, layer]:
                if expert != 65_535:
                    table[layer, expert] += 1
    return found


@pytest.mark.parametrize("by", [(), *((name,) for name in ALL), ALL])
def test_loads_by_columns_are_those_of_plain_loops_by_ascending_key(
    make_trace: MakeTrace, make_batch: Make, by: tuple[Key, ...]
) -> None:
    batch = make_batch(400, known=ALL)
    (found,) = grouped_loads(make_trace(batch), by)
    expected = naive(batch, by)
    assert list(map(tuple, found.keys.tolist())) == sorted(expected)
    for key, table in zip(map(tuple, found.keys.tolist()), found.counts, strict=True):
        np.testing.assert_array_equal(table, expected[key])


def test_groups_that_come_out_in_pieces_add_up(
    make_trace: MakeTrace, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "MAX_BYTES", 10 * 3 * 6 * 8)
    batch = make_batch(400, known=ALL)
    total: dict[tuple[int, ...], np.ndarray] = {}
    pieces = list(grouped_loads(make_trace(batch), ALL))
    for piece in pieces:
        assert len(piece.keys) <= 10
        for key, table in zip(map(tuple, piece.keys.tolist()), piece.counts, strict=True):
            total[key] = total.get(key, 0) + table
    assert len(pieces) > 1
    expected = naive(batch, ALL)
    assert total.keys() == expected.keys()
    for key, table in expected.items():
        np.testing.assert_array_equal(total[key], table)


def test_a_column_that_was_not_recorded_is_refused_by_name(make_trace: MakeTrace, make_batch: Make) -> None:
    with pytest.raises(UsageError, match="step"):
        list(grouped_loads(make_trace(make_batch(10)), ("step",)))


def total(tables: list[CountTable]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for table in tables:
        assert table.step is None
        assert table.sample is not None
        for sample, layer, counts in zip(table.sample, table.layer, table.counts, strict=True):
            row = found.setdefault((int(sample), int(layer)), [0] * 6)
            found[int(sample), int(layer)] = [a + b for a, b in zip(row, counts.tolist(), strict=True)]
    return found


@pytest.mark.parametrize("most_rows", [1, 4, 10_000])
def test_rows_of_equal_keys_add_up(
    tmp_path: Path, meta: TraceMeta, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    rng = np.random.default_rng(0)
    tables = [
        CountTable(
            sample=rng.integers(-3, 4, 50),
            layer=rng.integers(0, 3, 50).astype(np.int32),
            counts=rng.integers(0, 9, (50, 6)),
        )
        for _ in range(3)
    ]
    write_counts(tmp_path / "counts", meta.model_copy(update={"form": "counts"}), tables)
    monkeypatch.setattr(loads, "MAX_BYTES", most_rows * 8 * 6)
    found = list(condense(read_counts(tmp_path / "counts")))
    assert total(found) == total(tables)
    assert max(map(len, found)) <= most_rows
    if most_rows == 10_000:
        (table,) = found
        assert table.sample is not None
        keys = list(zip(table.sample.tolist(), table.layer.tolist(), strict=True))
        assert keys == sorted(set(keys))
        assert max(Counter(keys).values()) == 1


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
