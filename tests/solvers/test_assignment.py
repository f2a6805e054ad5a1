import itertools
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.random import Generator
from scipy.optimize import linear_sum_assignment

from moeplan.errors import UsageError
from moeplan.solvers.arrays import flow_units
from moeplan.solvers.assignment import Method, balanced_assignment
from moeplan.solvers.balance import max_over_mean
from moeplan.solvers.cbc import solve_by_cbc
from moeplan.solvers.exchanges import cancel_cycles, first_of_ties, prices
from moeplan.solvers.optimum import exponent, fixed_point, greatest, settled
from moeplan.solvers.transport import transport
from tests.solvers.builders import Array

METHODS: tuple[Method, ...] = ("transport", "flow", "km", "pulp")
EXACT = METHODS[:3]
integers = st.integers(-5, 5) | st.integers(-(2**45), 2**45) | st.integers(-(2**58), 2**58)
near_ties = st.builds(lambda n, ulps: n / 10 + ulps * 2.0**-54, st.integers(-7, 7), st.integers(-2, 2))
floats = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1e-9, 1 / 3, 1e12, -1e12])


def exact_cost(cost: Array, sink: list[int] | tuple[int, ...]) -> Fraction:
    return sum((Fraction(cost[i][n].item()) for i, n in enumerate(sink)), Fraction(0))


def best_deal(cost: Array, capacity: list[int]) -> tuple[int, ...]:
    deals = itertools.product(range(len(capacity)), repeat=len(cost))
    return min(
        (deal for deal in deals if all(deal.count(n) <= c for n, c in enumerate(capacity))),
        key=lambda deal: exact_cost(cost, deal),
    )


@st.composite
def problems(draw: st.DrawFn, entries: st.SearchStrategy[Any]) -> tuple[Array, list[int]]:
    num_items, num_sinks = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    capacity = draw(st.lists(st.integers(0, 4), min_size=num_sinks, max_size=num_sinks))
    capacity[-1] += max(0, num_items - sum(capacity))
    cells = draw(st.lists(entries, min_size=num_items * num_sinks, max_size=num_items * num_sinks))
    return np.array(cells).reshape(num_items, num_sinks), capacity


def certify(cost: Array, capacity: list[int], method: Method) -> bool:
    sink = balanced_assignment(cost, capacity, method)
    assert sink.shape == (len(cost),)
    assert (np.bincount(sink, minlength=len(capacity)) <= capacity).all()
    best_sink = best_deal(cost, capacity)
    found, best = exact_cost(cost, sink.tolist()), exact_cost(cost, best_sink)
    terms = exact_cost(abs(cost), sink.tolist()) + exact_cost(abs(cost), best_sink)
    assert abs(found - best) <= terms * Fraction(1, 2**48)
    return found == best


@settings(max_examples=150)
@given(problems(integers))
def test_integer_costs_are_assigned_as_the_first_of_the_best_by_brute_force(problem: tuple[Array, list[int]]) -> None:
    cost, capacity = problem
    for method in EXACT:
        assert certify(cost, capacity, method)
        assert balanced_assignment(cost, capacity, method).tolist() == list(best_deal(cost, capacity))


@settings(max_examples=150)
@given(problems(floats))
def test_float_costs_of_any_range_are_assigned_at_the_cost_of_brute_force(problem: tuple[Array, list[int]]) -> None:
    for method in EXACT:
        certify(*problem, method)


@given(problems(floats) | problems(near_ties))
def test_ties_and_near_ties_of_floats_fall_alike_in_every_method(problem: tuple[Array, list[int]]) -> None:
    found = [balanced_assignment(*problem, method).tolist() for method in EXACT]
    assert found[0] == found[1] == found[2]


@settings(max_examples=60)
@given(st.integers(1, 80), st.integers(2, 6), st.integers(0, 3), st.sampled_from([3, 1000]), st.integers(0, 2**32))
def test_larger_problems_have_one_answer_whatever_the_method_and_the_scale(
    num_items: int, num_sinks: int, spare: int, largest: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, largest, (num_items, num_sinks)) - rng.integers(0, largest, num_sinks)
    capacity = rng.multinomial(num_items + spare, rng.dirichlet(np.ones(num_sinks)))
    expected = balanced_assignment(cost, capacity).tolist()
    for method in EXACT:
        assert balanced_assignment(cost, capacity, method).tolist() == expected
        assert balanced_assignment(cost / 1024, capacity, method).tolist() == expected
    thirds = [balanced_assignment(cost / 3, capacity, method).tolist() for method in EXACT]
    assert thirds[0] == thirds[1] == thirds[2]


@pytest.mark.parametrize("num_sinks", [2, 5])
@pytest.mark.parametrize("kind", ["i1", "u2", "i4", "<i8", ">i8", "u8", "f2", "f4", ">f8", "g"])
def test_any_type_and_layout_of_the_same_costs_gives_the_same(kind: str, num_sinks: int, rng: Generator) -> None:
    cost = rng.integers(0, 100, (30, num_sinks))
    expected = balanced_assignment(cost, 16).tolist()
    given = cost.astype(kind)
    wide = np.zeros((60, 2 * num_sinks), dtype=kind)
    wide[::2, ::2] = given
    frozen = given.copy()
    frozen.flags.writeable = False
    for same in (given, np.asfortranarray(given), wide[::2, ::2], given[::-1][::-1], frozen, given.tolist()):
        assert balanced_assignment(same, 16).tolist() == expected
    assert (given == cost).all()
    assert balanced_assignment(cost, np.full(num_sinks, 16, dtype=np.uint8)).tolist() == expected


@pytest.mark.parametrize("kind", ["float", "integer", "equal", "skewed"])
def test_all_methods_agree_on_a_problem_beyond_brute_force(kind: str, rng: Generator) -> None:
    cost = {
        "float": rng.normal(size=(40, 6)),
        "integer": rng.integers(-100, 100, (40, 6)),
        "equal": np.full((40, 6), 3.5),
        "skewed": rng.normal(size=(40, 6)) * 10.0 ** rng.integers(-9, 9, (40, 6)),
    }[kind]
    capacity = [0, 3, 20, 10, 5, 9]
    found = [balanced_assignment(cost, capacity, method).tolist() for method in METHODS]
    assert found == [found[0]] * len(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_no_items_need_no_sink_and_one_sink_takes_all(method: Method) -> None:
    assert balanced_assignment(np.zeros((0, 3)), 0, method).shape == (0,)
    assert balanced_assignment([[2.0], [-1.0]], 2, method).tolist() == [0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_integers_up_to_the_limit_are_exact_of_any_type(method: Method) -> None:
    high = 2**61 // 5
    signed = np.array([[0, 1 - high, high, high], [high, high, 1 - high, -high], [high, 1 - high, high - 1, 1 - high]])
    assert balanced_assignment(signed, [1, 2, 3, 3], method).tolist() == [1, 3, 1]
    fine = np.array([[2**57, 2**57 + 1], [2**57 + 3, 2**57], [2**57 + 1, 2**57]], np.uint64)
    assert balanced_assignment(fine, [2, 1], method).tolist() == [0, 1, 0]
    assert balanced_assignment(np.array([[2**64 - 1, 0]], np.uint64), 1, method).tolist() == [1]


def test_a_wider_float_beyond_float64_is_refused_by_its_value() -> None:
    huge = np.array([[np.longdouble("1e400"), 1]])
    if not np.isfinite(huge).all():
        pytest.skip("long double is float64 here")
    with pytest.raises(ValueError, match=r"cost\[0, 0\] is 1e\+400; expected finite numbers within float64"):
        balanced_assignment(huge, 1)


def test_costs_near_the_largest_float_do_not_overflow() -> None:
    cost = np.array([[1e308, -1e308], [-1e308, 1e308]])
    for method in METHODS:
        assert balanced_assignment(cost, 1, method).tolist() == [1, 0]


def test_cancelling_cycles_mends_the_worst_assignment_through_spare_room() -> None:
    cost = np.array([[0.0, 5.0, 9.0], [5.0, 0.0, 9.0], [1.0, 7.0, 3.0]])
    assert cancel_cycles(cost, np.array([2, 1, 1]), np.array([1, 0, 2])).tolist() == [0, 1, 0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_costs_that_are_not_finite_are_refused(method: Method, bad: float) -> None:
    with pytest.raises(ValueError, match=r"cost\[0, 1\]"):
        balanced_assignment([[0.0, bad]], 1, method)
    with pytest.raises(ValueError, match=r"cost\[1, 0\]"):
        balanced_assignment(np.array([[0, 1, 2], [bad, 1, bad]], dtype=np.float32), 1, method)


def test_too_little_capacity_is_told_with_what_would_do() -> None:
    with pytest.raises(UsageError, match=r"5 items for 2 sinks that take 4 in all; .* at least 3"):
        balanced_assignment(np.zeros((5, 2)), 2)


@pytest.mark.parametrize(
    ("cost", "capacity", "method"),
    [
        ([1.0, 2.0], 1, "flow"),
        (np.zeros((2, 0)), 1, "flow"),
        ([["a"]], 1, "flow"),
        ([[1.0]], -1, "flow"),
        ([[1.0]], 1.5, "flow"),
        ([[1.0]], [1, 1], "flow"),
        ([[1.0]], 1, "simplex"),
    ],
)
def test_misuse_is_refused(cost: Array, capacity: list[int], method: Method) -> None:
    with pytest.raises(ValueError, match="expected"):
        balanced_assignment(cost, capacity, method)


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


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 4), st.integers(0, 2**32))
def test_ties_of_larger_problems_fall_alike_from_optima(num_items: int, num_sinks: int, spare: int, seed: int) -> None:
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


@settings(max_examples=60)
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


@pytest.mark.parametrize("method", ["transport", "flow", "km"])
def test_a_thousand_items_find_their_first_optimum_among_64_sinks(method: Method, rng: Generator) -> None:
    cost = rng.integers(0, 50, (1024, 64)) - rng.integers(0, 30, 64)
    assert (balanced_assignment(cost, 16, method) == balanced_assignment(cost, 16)).all()


@pytest.mark.parametrize(("num_items", "num_sinks", "times"), [(384, 2, 50), (768, 4, 30)])
def test_the_kernel_is_far_faster_than_kuhn_munkres(num_items: int, num_sinks: int, times: int, rng: Generator) -> None:
    cost, capacity = rng.integers(0, 10_000, (num_items, num_sinks)), num_items // num_sinks
    balanced_assignment(cost, capacity)
    doubled = np.repeat(cost.astype(float), capacity, axis=1)
    km_s = fastest_s(lambda: linear_sum_assignment(doubled), 3)
    assert fastest_s(lambda: balanced_assignment(cost, capacity), 50) * times < km_s


@settings(max_examples=50)
@given(arrays(np.int64, shapes))
def test_the_greatest_magnitude_is_that_of_every_integer_even_the_least(cost: Array) -> None:
    assert greatest(cost) == min(2**63 - 1, max(abs(value) for value in cost.ravel().tolist()))


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


def knapsack() -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("knapsack", pulp.LpMinimize)
    x = [model.add_variable(f"x_{i}", cat="Binary") for i in range(4)]
    model += pulp.lpDot([-10, -13, -7, -8], x)
    model += pulp.lpDot([5, 7, 4, 3], x) <= 11
    return model, x


def test_it_finds_the_optimum_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, x = knapsack()
    solve_by_cbc(model, time_limit_s=60, options=["randomSeed 3"])
    assert model.sol_status == pulp.LpSolutionOptimal
    assert [round(item.value()) for item in x] == [0, 1, 0, 1]
    assert not list(tmp_path.iterdir())


def test_one_deaf_to_its_limit_is_killed_and_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, files, called = tmp_path / "cbc", tmp_path / "files", tmp_path / "called"
    deaf.write_text(f'#!/bin/sh\necho "$@" > {called}\nexec sleep 60\n')
    deaf.chmod(0o755)
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(deaf))
    model, _ = knapsack()
    solve_by_cbc(model, time_limit_s=0.5)
    assert "-timeMode elapsed -sec 0.45 " in called.read_text()
    assert "-mips" not in called.read_text()  # no variable has a value
    assert model.sol_status == pulp.LpSolutionNoSolutionFound
    assert not list(files.iterdir())
