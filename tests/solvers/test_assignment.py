import itertools
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from moeplan.errors import UsageError
from moeplan.solvers.arrays import flow_units
from moeplan.solvers.assignment import Method, balanced_assignment
from moeplan.solvers.balance import max_over_mean
from moeplan.solvers.cbc import solve_by_cbc
from moeplan.solvers.transport import transport

Array = NDArray[Any]

METHODS: tuple[Method, ...] = ("transport", "flow", "km", "pulp")
EXACT = METHODS[:3]
integers = st.integers(-5, 5) | st.integers(-(2**39), 2**39)
large = integers | st.integers(-(2**45), 2**45) | st.integers(-(2**58), 2**58)
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
    found, best = exact_cost(cost, sink.tolist()), exact_cost(cost, best_deal(cost, capacity))
    largest = max((abs(Fraction(value)) for value in cost.ravel().tolist()), default=Fraction(0))
    assert abs(found - best) <= 2 * largest * Fraction(1 + len(cost), {"flow": 2**38, "pulp": 2**20}.get(method, 2**48))
    return found == best


@settings(deadline=None, max_examples=150)
@given(problems(large))
def test_integer_costs_are_assigned_at_the_least_cost_by_brute_force(problem: tuple[Array, list[int]]) -> None:
    assert certify(*problem, "transport")
    if abs(problem[0]).max(initial=0) <= 2**39:
        assert all(certify(*problem, method) for method in EXACT)


@settings(deadline=None, max_examples=150)
@given(problems(floats))
def test_float_costs_of_any_range_are_assigned_at_the_cost_of_brute_force(problem: tuple[Array, list[int]]) -> None:
    for method in EXACT:
        certify(*problem, method)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 60),
    st.integers(1, 12),
    st.sampled_from([2, 20, 10**6]),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_larger_problems_meet_kuhn_munkres_at_any_number_of_sinks(
    num_items: int, num_sinks: int, largest: int, popular: bool, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(-largest, largest, (num_items, num_sinks))
    cost -= popular * rng.integers(0, 4 * largest, num_sinks)
    capacity = rng.multinomial(num_items + spare, rng.dirichlet(np.ones(num_sinks)))
    sink_of_place = np.repeat(np.arange(num_sinks), capacity)
    least = cost[np.arange(num_items), sink_of_place[linear_sum_assignment(cost[:, sink_of_place])[1]]].sum()
    for sink in (transport(cost, capacity), *(balanced_assignment(cost, capacity, method) for method in EXACT)):
        assert (np.bincount(sink, minlength=num_sinks) <= capacity).all()
        assert cost[np.arange(num_items), sink].sum() == least
    thirds = balanced_assignment(cost / 3, capacity)
    assert cost[np.arange(num_items), thirds].sum() == least


@pytest.mark.parametrize("num_sinks", [2, 5])
@pytest.mark.parametrize("kind", ["i1", "u2", "i4", "<i8", ">i8", "u8", "f2", "f4", ">f8", "g"])
def test_any_type_and_layout_of_the_same_costs_gives_the_same_and_leaves_them_alone(
    kind: str, num_sinks: int, rng: np.random.Generator
) -> None:
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


@settings(deadline=None, max_examples=12)
@given(problems(floats) | problems(integers))
def test_cbc_agrees_with_brute_force(problem: tuple[Array, list[int]]) -> None:
    certify(*problem, "pulp")


def test_integers_up_to_the_limit_are_exact_of_any_type() -> None:
    high = 2**61 // 5
    signed = np.array([[0, 1 - high, high, high], [high, high, 1 - high, -high], [high, 1 - high, high - 1, 1 - high]])
    assert exact_cost(signed, balanced_assignment(signed, [1, 2, 3, 3]).tolist()) == 2 - 3 * high
    fine = np.array([[2**57, 2**57 + 1], [2**57 + 3, 2**57], [2**57 + 1, 2**57]], np.uint64)
    assert balanced_assignment(fine, [2, 1]).tolist() == [0, 1, 0]
    assert balanced_assignment(np.array([[2**64 - 1, 0]], np.uint64), 1).tolist() == [1]
    most = np.array([[-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)]])
    assert balanced_assignment(most, 1).tolist() == [0, 1]


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
