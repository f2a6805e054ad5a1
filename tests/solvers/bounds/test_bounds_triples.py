import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.solvers.bounds.triples import Prices, Triples

Array = NDArray[Any]
BruteForce = Callable[[Array, list[int], Array], float]

ALL_NODES = 10**9
CASES = [(2, 4, 2), (2, 6, 3), (3, 6, 2), (3, 6, 3), (4, 6, 2), (5, 4, 2)]


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def random_prices(rng: np.random.Generator, first: Prices, scale: float = 1.0) -> Prices:
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
    brute_force: BruteForce, executor: Executor, num_layers: int, num_experts: int, size: int, seed: int
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
def test_an_evaluation_gives_a_subgradient(
    executor: Executor, rng: np.random.Generator, num_layers: int, num_experts: int, size: int
) -> None:
    triples = Triples(rng.exponential(1, (num_layers - 1, num_experts, num_experts)), size, executor)
    here = random_prices(rng, triples.first_prices())
    found = triples.evaluate(here, ALL_NODES)
    for scale in (1e-6, 0.1, 3.0):
        there = random_prices(rng, here, scale)
        rise = found.gradient.dot(there.moved(here, 1.0))
        assert triples.evaluate(there, ALL_NODES).value >= found.value + rise - 1e-9


def test_an_estimate_is_never_more_and_a_search_cut_short_never_less(
    executor: Executor, rng: np.random.Generator
) -> None:
    weights = rng.exponential(1, (4, 9, 9))
    prices = random_prices(rng, Triples(weights, 3, executor).first_prices(), 0.2)
    exact = Triples(weights, 3, executor).evaluate(prices, ALL_NODES)
    estimate = Triples(weights, 3, executor).evaluate(prices, 0)
    cut = Triples(weights, 3, executor).evaluate(prices, 5)
    assert estimate.value <= exact.value <= cut.value
    assert (exact.searched, cut.searched, estimate.nodes) == (True, False, 0)


def test_renaming_experts_changes_no_bound(executor: Executor, rng: np.random.Generator) -> None:
    weights = rng.integers(0, 50, (3, 6, 6)).astype(float)
    names = [rng.permutation(6) for _ in range(4)]
    renamed = np.array([weight[np.ix_(*names[cut : cut + 2])] for cut, weight in enumerate(weights)])
    values = [Triples(w, 2, executor) for w in (weights, renamed)]
    first, second = (triples.evaluate(triples.first_prices(), ALL_NODES).value for triples in values)
    assert first == pytest.approx(second)
