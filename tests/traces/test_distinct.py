"""Different rows and values against sets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.traces import loads
from moeplan.traces.loads import Distinct, distinct_rows

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
