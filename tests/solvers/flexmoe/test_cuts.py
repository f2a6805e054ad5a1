import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from moeplan.solvers import quota
from moeplan.solvers.flexmoe.cuts import busiest_ratio, caps, guided, operate, settled, unrouted
from moeplan.solvers.flexmoe.state import holds, slots_in
from tests.solvers.flexmoe.layers import Array, holders, layers, naive_over_steps

Layer = tuple[Array, Array, int]


def most_routed(table: Array, total: Array, cap: int) -> float:
    """Pairs that the holders can serve at the cap, by a linear programme."""
    routes = [(e, d) for e in range(len(total)) for d in holders(table, e)]
    limits = np.zeros((len(total) + len(table), len(routes)))
    for i, (e, d) in enumerate(routes):
        limits[e, i] = limits[len(total) + d, i] = 1
    bounds = np.concatenate([total, np.full(len(table), cap)])
    return -float(linprog(-np.ones(len(routes)), limits, bounds).fun)


@settings(max_examples=50)
@given(layers(), st.sampled_from([0.0, 0.1]))
def test_the_potential_is_what_a_programme_cannot_route(layer: Layer, slack: float) -> None:
    table, pairs, _ = layer
    totals = pairs.sum(axis=2)
    cap = caps(totals, len(table), slack)
    over = sum(total.sum() - most_routed(table, total, int(c)) for total, c in zip(totals, cap, strict=True))
    assert unrouted(table, totals, cap) == pytest.approx(over, abs=1e-6)


@given(layers(), st.booleans())
def test_an_operation_lowers_the_potential_and_loses_no_expert(layer: Layer, keep: bool) -> None:
    table, pairs, _ = layer
    totals = pairs.sum(axis=2)
    cap, before = caps(totals, len(table), 0.0), table.copy()
    over = unrouted(table, totals, cap)
    kept = kept_of(table, totals.shape[1], keep)
    cells = operate(table, slots_in(table, totals.shape[1]), totals, kept, cap)
    if cells:
        assert unrouted(table, totals, cap) < over
        assert 1 <= np.count_nonzero(table != before) == cells
    else:
        assert table.tolist() == before.tolist()
    is_legal(table, totals.shape[1])
    assert holds(table, totals.shape[1])[kept].all()


@given(layers(vectors=3), st.floats(0, 10), st.sampled_from([0.0, 0.5, 1.0]))
def test_operations_are_kept_as_far_as_they_pay(layer: Layer, price: float, quantile: float) -> None:
    table, pairs, _ = layer
    totals = pairs.sum(axis=2)

    def ratio(one: Array) -> float:
        each = [quota.least(total, slots_in(one, len(total)))[0] * len(one) / max(total.sum(), 1) for total in totals]
        return naive_over_steps(each, quantile)

    found, cells = guided(table, totals, kept_of(table, totals.shape[1], False), 0.0, 1.0, price, quantile)
    is_legal(found, totals.shape[1])
    assert busiest_ratio(found, totals, quantile) == pytest.approx(ratio(found))
    assert ratio(table) - ratio(found) - cells * price >= -1e-12
    free, _ = guided(table, totals, kept_of(table, totals.shape[1], False), 0.0, 1.0, 0.0, quantile)
    assert ratio(free) <= ratio(found) + 1e-12


@given(layers(), st.integers(1, 2**32), st.booleans())
def test_kicks_do_no_harm_and_are_the_same_again(layer: Layer, seed: int, keep: bool) -> None:
    table, pairs, _ = layer
    totals = pairs.sum(axis=2)
    cap = caps(totals, len(table), 0.0)
    kept = kept_of(table, totals.shape[1], keep)
    plain = settled(table, totals, kept, 0.0, 0, np.array([seed], np.uint64))
    kicked = settled(table, totals, kept, 0.0, 5, np.array([seed], np.uint64))
    assert unrouted(kicked, totals, cap) <= unrouted(plain, totals, cap) <= unrouted(table, totals, cap)
    assert kicked.tolist() == settled(table, totals, kept, 0.0, 5, np.array([seed], np.uint64)).tolist()
    is_legal(kicked, totals.shape[1])
    assert holds(kicked, totals.shape[1])[kept].all()


def test_kicks_find_the_best_of_all_small_tables_nearly_always() -> None:
    tables = [
        np.array([a, b])
        for a, b in itertools.product(itertools.combinations(range(4), 3), repeat=2)
        if {*a, *b} == {*range(4)}
    ]
    optimal = 0
    for seed in range(60):
        total = np.random.default_rng(seed).integers(1, 100, 4)
        best = min(quota.least(total, slots_in(one, 4))[0] for one in tables)
        found = settled(tables[0], total[None], kept_of(tables[0], 4, False), 0.0, 50, np.array([7], np.uint64))
        reached = quota.least(total, slots_in(found, 4))[0]
        assert best <= reached <= 1.1 * best
        optimal += reached == best
    assert optimal >= 50


def test_where_operations_stick_kicks_balance_a_training_like_layer() -> None:
    rng = np.random.default_rng(3)
    share = 1 / np.arange(1, 33) ** 1.26
    total = rng.multinomial(260_000, share / share.sum())
    table = np.arange(16 * 3).reshape(16, 3) % 32
    found = settled(table, total[None], kept_of(table, 32, False), 0.0, 200, np.array([7], np.uint64))
    assert busiest_ratio(table, total[None]) > 3
    assert busiest_ratio(found, total[None]) < 1.001


def is_legal(table: Array, num_experts: int) -> None:
    assert {*table[table >= 0].tolist()} == {*range(num_experts)}
    for row in table:
        held = row[row >= 0].tolist()
        assert len({*held}) == len(held)


def kept_of(table: Array, num_experts: int, keep: bool) -> Array:
    """Whether every expert must stay on the first device that holds it, or none on any, `[D, E]`."""
    kept = np.zeros((len(table), num_experts), np.bool_)
    for e in range(num_experts if keep else 0):
        kept[holders(table, e)[0], e] = True
    return kept
