"""The bound that prices prove: enumeration, and no placement that keeps more, whatever the prices."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.planner.certify import bounds
from moeplan.planner.certify.bounds import kept_by_prices
from moeplan.solvers.bounds import thorough_bound
from tests.builders import known

Array = NDArray[Any]
CASES = [(2, 4, 2), (2, 6, 3), (3, 6, 2), (3, 6, 3), (4, 6, 2), (5, 4, 2), (3, 5, 1), (3, 4, 4)]


def most_kept(weights: Array, size: int) -> float:
    """The best placement of all, layer by layer."""
    num_experts = weights.shape[1]
    every = itertools.product(range(num_experts // size), repeat=num_experts)
    homes = np.array([p for p in every if max(map(p.count, p)) <= size])
    value = np.zeros(len(homes))
    for weight in weights:
        step = np.array([[weight[a[:, None] == b].sum() for b in homes] for a in homes])
        value = (value[:, None] + step).max(axis=0)
    return float(value.max())


def enumerated(weights: Array, table: Array, size: int) -> float:
    """The bound by the prices of experts, group by group, without floors."""
    num_layers, num_experts = table.shape[:2]
    total = 0.0
    for m in range(1, max(2, num_layers - 1)):
        earlier = np.zeros_like(weights[0]) if m == 1 else table[m - 1, :, :num_experts]
        later = weights[-1] if m == num_layers - 2 else table[m, :, :num_experts]
        own, before, after, _ = table[m, :, num_experts:].T
        best = np.full(num_experts, -np.inf)
        for group in itertools.combinations(range(num_experts), size):
            held = list(group)
            came = (weights[m - 1] - earlier)[:, held].sum(axis=1) - before
            worth = np.sort(came)[-size:].sum() - own[held].sum()
            if num_layers > 2:
                worth += np.sort(later[held].sum(axis=0) - after)[-size:].sum()
            best[held] = np.maximum(best[held], worth)
        total += best.sum() / size + own.sum() + before.sum() + (after.sum() if num_layers > 2 else 0)
    return float(total)


def drawn(seed: int, scale: float, num_layers: int, num_experts: int) -> tuple[Array, Array]:
    """Weights between layers, and a table of prices."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 50, (num_layers - 1, num_experts, num_experts)).astype(float)
    return weights, rng.normal(0, scale, (num_layers, num_experts, num_experts + 4))


@pytest.mark.parametrize(("num_layers", "num_experts", "size"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_prices_prove_what_enumeration_gives(num_layers: int, num_experts: int, size: int, seed: int) -> None:
    weights, table = drawn(seed, 20.0, num_layers, num_experts)
    table[:, :, -1] = -1e9
    assert kept_by_prices(weights, table, size) == pytest.approx(enumerated(weights, table, size))


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(CASES[:4]), st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 30.0, 1e6, 1e17]))
def test_no_placement_keeps_more_whatever_the_prices_and_floors_even_where_sums_lose_their_last_digits(
    case: tuple[int, int, int], seed: int, scale: float
) -> None:
    num_layers, num_experts, size = case
    weights, table = drawn(seed, scale, num_layers, num_experts)
    assert known(kept_by_prices(weights, table, size)) >= most_kept(weights, size)


@pytest.mark.parametrize(("num_layers", "num_experts", "size"), [(2, 12, 4), (4, 12, 3), (3, 12, 4), (5, 8, 4)])
def test_the_solvers_proof_proves_its_bound_and_less_proves_less(num_layers: int, num_experts: int, size: int) -> None:
    rng = np.random.default_rng(7)
    weights = rng.poisson(rng.dirichlet(np.full(num_experts, 0.3), (num_layers - 1, num_experts)) * 100).astype(float)
    bound = thorough_bound(weights, np.full(num_experts // size, size), time_limit_s=60)
    proof = known(bound.proof)
    proven = known(kept_by_prices(weights, proof, size))
    assert bound.value <= proven < bound.value + 1
    for changed in (proof * 0, proof * 0.5, proof + np.eye(num_experts + 4)[-1] * weights.sum()):
        assert known(kept_by_prices(weights, changed, size)) > proven


def test_more_groups_than_there_is_patience_for_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_GROUPS", 1000)
    weights, table = np.random.default_rng(7).exponential(1, (3, 12, 12)), np.zeros((4, 12, 16))
    assert kept_by_prices(weights, table, 6) is None
    monkeypatch.setattr(bounds, "MOST_GROUPS", 10**6)
    assert kept_by_prices(weights, table, 6) is not None
