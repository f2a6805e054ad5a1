import itertools
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from moeplan.solvers.assignment import Method, balanced_assignment
from moeplan.solvers.exchanges import first_of_ties, prices
from moeplan.solvers.optimum import exponent, fixed_point, greatest, settled
from moeplan.solvers.transport import transport

Array = NDArray[Any]
shapes = array_shapes(min_dims=2, max_dims=2, max_side=4)
finite = st.floats(allow_nan=False, allow_infinity=False)


def by_kuhn_munkres(cost: Array, capacity: Array) -> Array:
    sink_of_place = np.repeat(np.arange(len(capacity)), capacity)
    sinks: Array = sink_of_place[linear_sum_assignment(cost[:, sink_of_place])[1]]
    return sinks


def value(cost: Array, sink: Array) -> int:
    return int(cost[np.arange(len(sink)), sink].sum())


def first_optimum(cost: Array, capacity: Array) -> list[int]:
    """Item after item, the lowest sink that leaves an optimum: one Kuhn-Munkres each."""
    best = value(cost, by_kuhn_munkres(cost, capacity))
    cost = cost.copy()
    for i, row in enumerate(cost.copy()):
        for n in np.flatnonzero(capacity):
            cost[i] = 10**6
            cost[i, n] = row[n]
            if value(cost, by_kuhn_munkres(cost, capacity)) == best:
                break
    return list(by_kuhn_munkres(cost, capacity).tolist())


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 60),
    st.integers(1, 12),
    st.sampled_from([2, 20, 10**6]),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_the_kernel_meets_kuhn_munkres_at_any_number_of_sinks(
    num_items: int, num_sinks: int, largest: int, popular: bool, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(-largest, largest, (num_items, num_sinks))
    cost -= popular * rng.integers(0, 4 * largest, num_sinks)
    capacity = rng.multinomial(num_items + spare, rng.dirichlet(np.ones(num_sinks)))
    sink = transport(cost, capacity)
    assert (np.bincount(sink, minlength=num_sinks) <= capacity).all()
    assert value(cost, sink) == value(cost, by_kuhn_munkres(cost, capacity))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 4), st.integers(0, 2**32))
def test_ties_of_larger_problems_fall_alike_from_any_optimum(
    num_items: int, num_sinks: int, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 3, (num_items, num_sinks))
    capacity = rng.multinomial(num_items + spare, rng.dirichlet(np.ones(num_sinks)))
    order = rng.permutation(num_items)
    shuffled = np.empty(num_items, dtype=np.int64)
    shuffled[order] = transport(cost[order], capacity)
    starts = (transport(cost, capacity), by_kuhn_munkres(cost, capacity), shuffled)
    firsts = [first_of_ties(cost, capacity, start)[0] for start in starts]
    assert firsts[0].tolist() == firsts[1].tolist() == firsts[2].tolist()
    assert firsts[0].tolist() == first_optimum(cost, capacity)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32))
def test_prices_exist_exactly_for_optimal_assignments(num_items: int, num_sinks: int, spare: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 6, (num_items, num_sinks))
    capacity = rng.multinomial(num_items + spare, rng.dirichlet(np.ones(num_sinks)))
    best = value(cost, by_kuhn_munkres(cost, capacity))
    sink = rng.permutation(np.repeat(np.arange(num_sinks), capacity))[:num_items]
    price, settled = prices(cost, capacity, sink, 0)
    assert settled == first_of_ties(cost, capacity, sink)[1] == (value(cost, sink) == best)
    if settled:
        room = np.bincount(sink, minlength=num_sinks) < capacity
        assert (price >= 0).all()
        assert (price[room] == 0).all()
        assert (cost[np.arange(num_items), sink] + price[sink] <= (cost + price)[:, capacity > 0].min(axis=1)).all()


def test_integers_up_to_2_to_the_53_are_told_apart() -> None:
    large = 2**53
    cost = np.array([[-large, large], [-large + 1, large], [-large, large - 1]])
    best = min(itertools.product(range(2), repeat=3), key=lambda s: (s.count(0) > 1, value(cost, np.array(s)), s))
    assert balanced_assignment(cost, [1, 2]).tolist() == list(best)


@pytest.mark.parametrize("method", ["transport", "flow", "km"])
def test_a_thousand_items_find_their_first_optimum_among_64_sinks(method: Method, rng: np.random.Generator) -> None:
    cost = rng.integers(0, 50, (1024, 64)) - rng.integers(0, 30, 64)
    assert (balanced_assignment(cost, 16, method) == balanced_assignment(cost, 16)).all()


@pytest.mark.parametrize(("num_items", "num_sinks", "times"), [(384, 2, 50), (768, 4, 30)])
def test_the_kernel_is_much_faster_than_kuhn_munkres_on_the_same_costs(
    num_items: int, num_sinks: int, times: int, rng: np.random.Generator
) -> None:
    cost, capacity = rng.integers(0, 10_000, (num_items, num_sinks)), num_items // num_sinks
    balanced_assignment(cost, capacity)
    doubled = np.repeat(cost.astype(float), capacity, axis=1)
    km_s = fastest_s(lambda: linear_sum_assignment(doubled), 3)
    assert fastest_s(lambda: balanced_assignment(cost, capacity), 50) * times < km_s


@settings(deadline=None, max_examples=50)
@given(arrays(np.int64, shapes))
def test_the_greatest_magnitude_is_that_of_every_integer_even_the_least(cost: Array) -> None:
    assert greatest(cost) == min(2**63 - 1, max(abs(value) for value in cost.ravel().tolist()))


def test_a_magnitude_that_no_float_holds_is_exact() -> None:
    assert greatest(np.array([[2**61 // 5, -3]])) == 2**61 // 5
    assert greatest(np.array([[1 - 2**63, 3]])) == 2**63 - 1


@settings(deadline=None, max_examples=100)
@given(arrays(np.float64, shapes, elements=finite))
def test_the_exponent_is_the_least_that_bounds_all_magnitudes(cost: Array) -> None:
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
def test_fixed_point_is_the_nearest_integer_and_says_whether_it_is_all(cost: Array) -> None:
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


def fastest_s(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
