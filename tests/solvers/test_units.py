from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from moeplan.solvers.assignment import Method, balanced_assignment
from moeplan.solvers.units import exponent, fixed_point, greatest, settled

shapes = array_shapes(min_dims=2, max_dims=2, max_side=4)
finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=50)
@given(arrays(np.int64, shapes))
def test_the_greatest_magnitude_is_that_of_every_integer_even_the_least(cost: np.ndarray) -> None:
    assert greatest(cost) == min(2**63 - 1, max(abs(value) for value in cost.ravel().tolist()))


def test_a_magnitude_that_no_float_holds_is_exact() -> None:
    assert greatest(np.array([[2**61 // 5, -3]])) == 2**61 // 5
    assert greatest(np.array([[1 - 2**63, 3]])) == 2**63 - 1


@settings(deadline=None, max_examples=100)
@given(arrays(np.float64, shapes, elements=finite))
def test_the_exponent_is_the_least_that_bounds_all_magnitudes(cost: np.ndarray) -> None:
    largest = Fraction(max(abs(value) for value in cost.ravel().tolist()))
    found = exponent(cost)
    assert largest < Fraction(2) ** found
    assert found == -1022 or largest >= Fraction(2) ** (found - 1)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (2, 1)])
def test_a_cost_that_is_not_finite_has_an_exponent_of_its_own(bad: float, at: tuple[int, int]) -> None:
    cost = np.full((3, 2), np.finfo(np.float64).max)
    assert exponent(cost) == 1024
    cost[at] = bad
    assert exponent(cost) == 1025


@settings(deadline=None, max_examples=100)
@given(arrays(np.float64, shapes, elements=finite))
def test_fixed_point_is_the_nearest_integer_and_says_whether_it_is_all(cost: np.ndarray) -> None:
    power = 58 - exponent(cost)
    units, exact = fixed_point(cost, power)
    scaled = [Fraction(value) * Fraction(2) ** power for value in cost.ravel().tolist()]
    assert units.ravel().tolist() == [round(value) for value in scaled]
    assert exact == all(value.denominator == 1 or abs(value) < Fraction(2) ** -1074 for value in scaled)


def test_units_settle_what_they_tell_apart_and_not_what_is_far_finer() -> None:
    capacity, cost = np.array([1, 1]), np.array([[1.0, 3.0], [2.0, 1.0]])
    assert settled(cost, 58 - exponent(cost), capacity, np.array([0, 1]))
    assert not settled(cost, 4, capacity, np.array([1, 0]))
    fine, capacity = np.array([[1e-30, 3e-30], [2e-30, 1e-30], [1e30, 0.0]]), np.array([1, 2])
    assert settled(fine, 58 - exponent(fine), capacity, np.array([0, 1, 1]))
    assert not settled(fine, 58 - exponent(fine), capacity, np.array([1, 0, 1]))
    methods: tuple[Method, ...] = ("transport", "flow", "km")
    for method in methods:
        assert balanced_assignment(fine, capacity, method).tolist() == [0, 1, 1]
