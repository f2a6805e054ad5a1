"""Loads by step, sample and source rank against plain loops."""

from collections.abc import Callable

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.traces import loads
from moeplan.traces.loads import grouped_loads
from moeplan.traces.reader import Trace
from moeplan.traces.schema import Key, TokenBatch

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
