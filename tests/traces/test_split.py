"""Splits: by the hash of a unit, the same however a trace is cut into batches."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.traces.schema import TokenBatch
from moeplan.traces.split import BLOCK_ROWS, fitted, mixed, unit_kind, units, with_units

Make = Callable[..., TokenBatch]
MASK = 2**64 - 1


@pytest.mark.parametrize(("known", "kind"), [(("sample", "step"), "sample"), (("step",), "step"), ((), "block")])
def test_samples_come_before_steps_and_steps_before_blocks(make_batch: Make, known: tuple[str, ...], kind: str) -> None:
    assert unit_kind(make_batch(5, known=known)) == kind


@pytest.mark.parametrize("known", [("sample",), ("step",), ()])
def test_units_do_not_depend_on_how_a_trace_is_cut(make_batch: Make, known: tuple[str, ...]) -> None:
    whole = make_batch(1000, known=known)
    pieces = [whole.select(slice(start, start + 77)) for start in range(0, 1000, 77)]
    found = np.concatenate([unit for _, unit in with_units(pieces)])
    np.testing.assert_array_equal(found, units(whole, 0))


def test_blocks_are_consecutive_rows(make_batch: Make) -> None:
    unit_T = units(make_batch(600, known=()), 0)
    np.testing.assert_array_equal(unit_T, np.arange(600) // BLOCK_ROWS)


def test_a_unit_is_fitted_by_the_published_hash() -> None:
    ids = np.array([0, 1, -5, 2**40 + 3])
    for seed, fraction in ((0, 0.5), (7, 0.2)):
        expected = [
            int.from_bytes(hashlib.sha256(f"{seed}:{unit}".encode()).digest()[:8], "big") / 2**64 < fraction
            for unit in ids.tolist()
        ]
        assert fitted(ids, seed=seed, fraction=fraction).tolist() == expected


def test_all_are_fitted_at_one_and_about_half_at_half() -> None:
    ids = np.arange(4000)
    assert fitted(ids, seed=1, fraction=1.0).all()
    assert 0.46 < fitted(ids, seed=1, fraction=0.5).mean() < 0.54


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_the_hash_of_a_sample_is_the_first_output_of_splitmix64_for_that_seed(ids: list[int]) -> None:
    expected = []
    for seed in ids:
        z = (seed + 0x9E3779B97F4A7C15) & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        expected.append(z ^ z >> 31)
    assert mixed(np.array(ids, np.int64)).tolist() == expected
