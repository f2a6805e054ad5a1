from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.solvers.arrays import flow_units
from moeplan.solvers.balance import max_over_mean


@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_integers_stay_what_they_are(values: list[int]) -> None:
    units, scale = flow_units(np.array(values, dtype=float))
    assert (units.tolist(), scale) == (values, 1)


@given(st.lists(st.floats(0, 1e308), min_size=1))
def test_units_are_never_less_than_what_they_stand_for_and_at_most_one_more(values: list[float]) -> None:
    units, scale = flow_units(np.array(values))
    for unit, value in zip(units.tolist(), values, strict=True):
        exact = Fraction(value) * Fraction(scale)
        assert exact * (1 - Fraction(1, 2**50)) - Fraction(1, 2**1000) <= unit < exact * (1 + Fraction(1, 2**50)) + 1


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros(0), np.full(2, 5e-324)], ids=str)
def test_nothing_and_next_to_nothing_are_scaled_without_overflow(values: np.ndarray) -> None:
    units, scale = flow_units(values)
    assert (units >= values * scale).all()
    assert units.max(initial=0) <= 2**40


def test_the_largest_over_the_mean_is_taken_and_idle_rows_are_even() -> None:
    loads = np.array([[[1.0, 3.0], [0.0, 0.0]], [[2.0, 2.0], [6.0, 0.0]]])
    assert max_over_mean(loads).tolist() == [[1.5, 1.0], [1.0, 2.0]]
