"""No placement keeps more than any bound, and triples are bounded by what their prices prove."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from scipy.optimize import linprog

from moeplan.solvers.bounds import (
    ThoroughBound,
    kept_bound,
    row_bound,
    spectral_bound,
    thorough_bound,
    transportation_bound,
)
from moeplan.solvers.bounds.groups import climb, search
from moeplan.solvers.bounds.triples import Prices, Triples
from tests.solvers.builders import Array, brute_force

SLOTS = [[2, 2], [3, 1], [1, 1, 2], [1, 1, 1, 1], [4, 0], [2, 3], [2, 2, 2]]


@settings(max_examples=60)
@given(st.sampled_from(SLOTS), st.integers(0, 2**32), st.sampled_from([1.0, 1e-7, 3e13]))
def test_no_placement_keeps_more_than_any_bound(slots: list[int], seed: int, scale: float) -> None:
    num_experts = 4 if sum(slots) == 4 else sum(slots) - 1  # the last ones leave room
    rng = np.random.default_rng(seed)
    weight = rng.dirichlet(np.full(num_experts, 0.2), num_experts) * rng.integers(1, 100, num_experts)[:, None] * scale
    best = brute_force(weight[None], slots, np.eye(len(slots)))
    assert transportation_bound(weight, np.array(slots)) >= best * (1 - 1e-12)
    assert spectral_bound(weight, np.array(slots)) >= best * (1 - 1e-12)
    assert row_bound(weight, np.array(slots)) >= best * (1 - 1e-12)


def keep_with_replicas(weight: Array, here: tuple[tuple[int, ...], ...], there: tuple[tuple[int, ...], ...]) -> float:
    """The weight that may stay, were every token on the best replica for where it goes next."""
    pairs = itertools.product(range(len(weight)), repeat=2)
    return sum(
        float(weight[a, b]) for a, b in pairs if any(a in x and b in y for x, y in zip(here, there, strict=True))
    )


@pytest.mark.parametrize("slots", [[2, 2], [2, 1, 1], [3, 2], [1, 1, 1, 1]])
def test_no_placement_with_replicas_keeps_more_than_the_bound(slots: list[int], rng: Generator) -> None:
    weight = rng.dirichlet(np.full(3, 0.4), 3)
    choices = itertools.product(*(itertools.combinations(range(3), s) for s in slots))
    layers = [held for held in choices if {e for device in held for e in device} == {0, 1, 2}]
    best = max(keep_with_replicas(weight, here, there) for here in layers for there in layers)
    assert kept_bound(weight[None], np.array(slots)).value >= best - 1e-12


@settings(max_examples=20)
@given(st.sampled_from([slots for slots in SLOTS if sum(slots) <= 5]), st.integers(0, 2**32))
def test_the_transportation_bound_is_the_optimum_of_its_linear_programme(slots: list[int], seed: int) -> None:
    size, rng = sum(slots), np.random.default_rng(seed)
    weight, one = rng.dirichlet(np.full(size, 0.3), size), np.ones((1, size))
    meets = np.vstack([np.kron(np.eye(size), one), np.kron(one, np.eye(size))])
    joined = sum(width**2 for width in slots)
    limits = np.full(2 * size, max(slots))
    optimum = linprog(-weight.ravel(), meets, limits, np.ones((1, size * size)), [joined], (0, 1), method="highs")
    assert transportation_bound(weight, np.array(slots)) == pytest.approx(-optimum.fun, rel=1e-9)


def test_the_spectral_bound_of_equal_slots_is_the_published_one_and_can_be_the_better(rng: Generator) -> None:
    weight = rng.normal(5, 0.3, (48, 48))
    centre = np.eye(48) - 1 / 48
    singular = np.linalg.svd(centre @ weight @ centre, compute_uv=False)
    slots = np.full(4, 12)
    assert spectral_bound(weight, slots) == pytest.approx(weight.sum() / 4 + 12 * singular[:3].sum())
    assert spectral_bound(weight, slots) < transportation_bound(weight, slots)
    assert kept_bound(weight[None], slots).kind == "spectral"


def test_the_row_bound_lets_every_expert_meet_its_heaviest_transitions(rng: Generator) -> None:
    weight = rng.integers(0, 100, (6, 6)).astype(float)
    by_loops = [sum(sum(sorted(row)[-3:]) for row in w.tolist()) for w in (weight, weight.T)]
    assert row_bound(weight, np.array([3, 2, 1])) == pytest.approx(min(by_loops), rel=1e-11)
    assert row_bound(weight, np.array([3, 2, 2])) == weight.sum()


def test_layer_pairs_that_time_does_not_reach_get_the_row_bound(rng: Generator) -> None:
    weights, slots = rng.dirichlet(np.full(8, 0.3), (3, 8)), np.full(4, 2)
    late = kept_bound(weights, slots, time_limit_s=0)
    assert late.kind == "row"
    assert late.value == pytest.approx(sum(row_bound(weight, slots) for weight in weights))
    assert late.value > kept_bound(weights, slots).value


def test_many_experts_have_the_same_spectral_bound_within_a_millionth_and_not_below(rng: Generator) -> None:
    weight = rng.dirichlet(np.full(96, 0.1), 96)
    centred = weight - weight.mean(axis=0) - weight.mean(axis=1, keepdims=True) + weight.mean()
    exact = weight.sum() / 48 + 2 * np.linalg.svd(centred, compute_uv=False)[:47].sum()
    assert exact <= spectral_bound(weight, np.full(48, 2)) <= exact * (1 + 1e-6)


ALL_NODES = 10**9
GO = np.zeros(1, bool)


def worth_of(worth: Array, sides: int, group: tuple[int, ...]) -> float:
    """The group with the best others of each side, by sorting."""
    sums = worth[list(group)].sum(axis=0).reshape(sides, -1)
    return float(np.sort(sums, axis=1)[:, -len(group) :].sum())


def best_by_enumeration(worth: Array, sides: int, size: int) -> Array:
    best = np.full(len(worth), -np.inf)
    for group in itertools.combinations(range(len(worth)), size):
        best[list(group)] = np.maximum(best[list(group)], worth_of(worth, sides, group))
    return best


def first_groups(num_experts: int, size: int) -> Array:
    return (np.arange(num_experts)[:, None] + np.arange(size)) % num_experts


@pytest.mark.parametrize("most_nodes", [1, 5, 25, 100])
def test_a_search_cut_short_says_how_much_it_may_have_missed(most_nodes: int, rng: Generator) -> None:
    worth = rng.exponential(1, (10, 20))
    groups = first_groups(10, 4)
    value = climb(worth, 2, groups)
    missed, nodes = search(worth, 2, groups, value, most_nodes, GO)
    assert nodes <= most_nodes
    assert (np.maximum(value, missed) >= best_by_enumeration(worth, 2, 4) - 1e-9).all()


def test_a_search_that_is_stopped_ends_at_once_and_its_bound_holds(rng: Generator) -> None:
    worth = rng.exponential(1, (32, 64))
    groups = first_groups(32, 12)
    value = climb(worth, 2, groups)
    missed, nodes = search(worth, 2, groups, value, ALL_NODES, np.ones(1, bool))
    assert nodes == 0
    for group in (rng.choice(32, 12, replace=False) for _ in range(100)):
        assert worth_of(worth, 2, tuple(group)) <= min(np.maximum(value, missed)[group])


def test_a_climb_leaves_no_group_that_another_turn_improves(rng: Generator) -> None:
    worth = rng.normal(0, 1, (8, 16))
    groups = first_groups(8, 3)
    value = climb(worth, 2, groups)
    for expert, group in enumerate(groups):
        assert expert in group
        assert worth_of(worth, 2, tuple(group)) == pytest.approx(value[expert])
    assert climb(worth, 2, groups.copy()) == pytest.approx(value)


CASES = [(2, 4, 2), (2, 6, 3), (3, 6, 2), (3, 6, 3), (4, 6, 2), (5, 4, 2)]


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def random_prices(rng: Generator, first: Prices, scale: float = 1.0) -> Prices:
    """Any prices, as a step from the first ones; the pairs at the ends belong to one triple alone."""
    share = rng.normal(0, scale, first.share.shape)
    share[0] = share[-1] = 0.0
    return first.moved(Prices(share, *rng.normal(0, scale, (3, *first.own.shape))), 1.0)


def value_by_enumeration(weights: Array, size: int, prices: Prices) -> float:
    """(3), group by group and expert by expert."""
    num_experts, total = weights.shape[1], 0.0
    for middle in range(1, max(2, len(weights))):
        before = weights[middle - 1] - prices.share[middle - 1] - prices.before[middle][:, None] / size
        after = None
        if middle < len(weights):
            after = prices.share[middle] - prices.after[middle] / size
        best = np.full(num_experts, -np.inf)
        for group in itertools.combinations(range(num_experts), size):
            held = list(group)
            worth = np.sort(before[:, held].sum(axis=1))[-size:].sum() - prices.own[middle][held].sum()
            if after is not None:
                worth += np.sort(after[held].sum(axis=0))[-size:].sum()
            best[held] = np.maximum(best[held], worth)
        priced = prices.own[middle].sum() + prices.before[middle].sum()
        total += best.sum() / size + priced + (0.0 if after is None else prices.after[middle].sum())
    return float(total)


@pytest.mark.parametrize(("num_layers", "num_experts", "size"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_any_prices_give_the_bound_that_enumeration_gives_and_no_placement_exceeds(
    executor: Executor, num_layers: int, num_experts: int, size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.exponential(1, (num_layers - 1, num_experts, num_experts))
    triples = Triples(weights, size, executor)
    devices = num_experts // size
    best = brute_force(weights, [size] * devices, np.eye(devices))
    for prices in (triples.first_prices(), random_prices(rng, triples.first_prices())):
        found = triples.evaluate(prices, ALL_NODES)
        assert found.searched
        assert found.value == pytest.approx(value_by_enumeration(weights, size, prices))
        assert found.value >= best


@pytest.mark.parametrize(("num_layers", "num_experts", "size"), CASES)
def test_evaluations_give_subgradients(
    executor: Executor, rng: Generator, num_layers: int, num_experts: int, size: int
) -> None:
    triples = Triples(rng.exponential(1, (num_layers - 1, num_experts, num_experts)), size, executor)
    here = random_prices(rng, triples.first_prices())
    found = triples.evaluate(here, ALL_NODES)
    for scale in (1e-6, 0.1, 3.0):
        there = random_prices(rng, here, scale)
        rise = found.gradient.dot(there.moved(here, 1.0))
        assert triples.evaluate(there, ALL_NODES).value >= found.value + rise - 1e-9


def test_an_estimate_is_never_more_nor_a_search_cut_short_less(executor: Executor, rng: Generator) -> None:
    weights = rng.exponential(1, (4, 9, 9))
    prices = random_prices(rng, Triples(weights, 3, executor).first_prices(), 0.2)
    exact = Triples(weights, 3, executor).evaluate(prices, ALL_NODES)
    estimate = Triples(weights, 3, executor).evaluate(prices, 0)
    cut = Triples(weights, 3, executor).evaluate(prices, 5)
    assert estimate.value <= exact.value <= cut.value
    assert (exact.searched, cut.searched, estimate.nodes) == (True, False, 0)


SIZES = [(2, 4, 2), (3, 6, 2), (3, 6, 3), (4, 4, 2)]  # layers, experts, experts a device


def least_of_column_generation(weights: Array, size: int) -> float:
    """The linear programme over all columns: a group of each of two or three layers, every expert in one."""
    num_experts, num_layers = weights.shape[1], len(weights) + 1
    groups = list(itertools.combinations(range(num_experts), size))
    columns = list(itertools.product(groups, repeat=num_layers))
    worth = [sum(w[np.ix_(*column[cut : cut + 2])].sum() for cut, w in enumerate(weights)) for column in columns]
    holds = np.zeros((num_layers, num_experts, len(columns)))
    for number, column in enumerate(columns):
        for layer, group in enumerate(column):
            holds[layer, list(group), number] = 1
    rows = holds.reshape(num_layers * num_experts, -1)
    return -float(linprog(-np.array(worth), A_eq=rows, b_eq=np.ones(len(rows)), method="highs").fun)


@settings(max_examples=15)
@given(st.sampled_from(SIZES), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_no_placement_keeps_more_nor_the_simple_bound_less(case: tuple[int, int, int], seed: int, known: float) -> None:
    num_layers, num_experts, size = case
    weights = np.random.default_rng(seed).integers(0, 9, (num_layers - 1, num_experts, num_experts)).astype(float)
    slots = np.full(num_experts // size, size)
    best = brute_force(weights, slots.tolist(), np.eye(len(slots)))
    found = thorough_bound(weights, slots, kept=known * best, time_limit_s=0.5)
    assert best <= found.value <= kept_bound(weights, slots).value


@pytest.mark.parametrize(("num_layers", "size"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e-7, 3e13])
def test_two_or_three_layers_get_the_bound_by_columns(rng: Generator, num_layers: int, size: int, scale: float) -> None:
    weights = rng.exponential(1, (num_layers - 1, 6, 6))
    slots = np.full(6 // size, size)
    least = least_of_column_generation(weights, size) * scale
    weights *= scale
    found = thorough_bound(weights, slots, time_limit_s=20)
    assert least * (1 - 1e-9) <= found.value <= least * 1.003
    assert least < kept_bound(weights, slots).value * 0.99
    assert found.kind == ("two-layer" if num_layers == 2 else "three-layer")


@pytest.mark.parametrize(
    ("slots", "experts", "reason"),
    [([1] * 6, 6, "one expert"), ([3, 2, 1], 6, "unequal"), ([4, 3], 6, "replicas"), ([4, 4], 6, "replicas"),
     ([6], 6, "no tighter"), ([16, 16], 32, "6.0e+08 groups of 16 experts")],
)  # fmt: skip
def test_where_triples_add_nothing_or_are_too_many_the_simple_bound_stands(
    rng: Generator, slots: list[int], experts: int, reason: str
) -> None:
    weights = rng.dirichlet(np.full(experts, 0.3), (3, experts))
    found, simple = thorough_bound(weights, np.array(slots)), kept_bound(weights, np.array(slots))
    assert (found.value, found.kind, found.proof) == (simple.value, simple.kind, None)
    assert reason in found.reason
    assert thorough_bound(weights[:0], np.array(slots)).value == 0.0


def test_bounds_only_improve_and_the_same_inputs_give_the_same(rng: Generator) -> None:
    weights, slots = rng.dirichlet(np.full(8, 0.3), (3, 8)), np.full(4, 2)
    runs: list[list[float]] = [[], []]
    found = [thorough_bound(weights, slots, on_progress=run.append) for run in runs]
    assert found[0] == found[1]
    assert runs[0] == runs[1] == sorted(runs[0], reverse=True)
    assert found[0].value == runs[0][-1]


def assert_bounds(found: ThoroughBound, weights: Array, size: int) -> None:
    """No less than experts in order keep, and no more than the simple bound."""
    layers, devices = len(weights), weights.shape[1] // size
    contiguous = np.einsum("lxaxb->", weights.reshape(layers, devices, size, devices, size))
    assert contiguous <= found.value <= kept_bound(weights, np.full(devices, size)).value


@pytest.mark.parametrize("size", [4, 8])
def test_a_time_limit_is_kept_and_leaves_a_bound(rng: Generator, size: int) -> None:
    weights, slots = rng.dirichlet(np.full(32, 0.1), (5, 32)), np.full(32 // size, size)
    thorough_bound(weights, slots, time_limit_s=0.1)  # compiled by then
    started = time.perf_counter()
    assert_bounds(thorough_bound(weights, slots, time_limit_s=2), weights, size)
    assert time.perf_counter() - started < 20  # unlimited, groups of 4 take twice that


def test_ctrl_c_ends_the_searches_and_leaves_a_bound(rng: Generator) -> None:
    weights, slots = rng.dirichlet(np.full(32, 0.1), (5, 32))[:, :24, :24], np.full(3, 8)
    thorough_bound(weights, slots, time_limit_s=0.1)  # compiled by then
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))

    def start(_: float) -> None:
        if timer.ident is None:
            timer.start()

    started = time.perf_counter()
    try:
        found = thorough_bound(weights, slots, time_limit_s=600, on_progress=start)
    finally:
        timer.cancel()
    assert found.interrupted
    assert time.perf_counter() - started < 60
    assert_bounds(found, weights, 8)


@pytest.mark.parametrize("num_layers", [2, 3, 5])
@pytest.mark.parametrize("even", [True, False])
def test_ties_are_bounded_by_what_is_kept(num_layers: int, even: bool) -> None:
    weights = (
        np.ones((num_layers - 1, 6, 6))
        if even
        else np.tile(np.kron(np.eye(3), np.ones((2, 2))), (num_layers - 1, 1, 1))
    )
    found = thorough_bound(weights, np.full(3, 2), time_limit_s=60)
    assert found.value == (num_layers - 1) * 12
    assert thorough_bound(weights * 0, np.full(3, 2), time_limit_s=60).value == 0


class ReachedError(Exception):
    """A bound as good as asked for."""


@pytest.mark.parametrize(("num_devices", "share"), [(16, 0.47), (8, 0.61)])
def test_real_routing_is_bounded_near_what_is_kept(gpt_oss: Path, num_devices: int, share: float) -> None:
    with np.load(gpt_oss) as arrays:
        first_TL = arrays["expert_ids"][:, :, 0].astype(np.int64)
    pairs = first_TL[:, :-1] * 32 + first_TL[:, 1:]
    weights = np.array([np.bincount(pair, minlength=1024) for pair in pairs.T], dtype=float).reshape(-1, 32, 32)

    def stop(bound: float) -> None:
        if bound <= share * weights.sum():
            raise ReachedError

    with pytest.raises(ReachedError):
        thorough_bound(weights, np.full(num_devices, 32 // num_devices), time_limit_s=300, on_progress=stop)
