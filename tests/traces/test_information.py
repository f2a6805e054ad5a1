"""Mutual information against plain loops, planted dependence and shuffled tokens."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.traces.information import Information, affinity_information, entropy, mutual_information

TABLES = hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(0, 50))


def naive(table: np.ndarray) -> float:
    """sum_ab p_ab log2(p_ab / (p_a p_b)), cell by cell."""
    total, bits = table.sum(), 0.0
    for a in range(table.shape[0]):
        for b in range(table.shape[1]):
            if table[a, b]:
                joint = table[a, b] / total
                bits += joint * math.log2(joint / (table[a].sum() / total * table[:, b].sum() / total))
    return bits


def transitions(first_T: np.ndarray, next_T: np.ndarray, experts: int) -> np.ndarray:
    table = np.zeros((1, experts, experts), np.int64)
    np.add.at(table[0], (first_T, next_T), 1)
    return table


@given(TABLES)
def test_it_is_that_of_plain_loops(table: np.ndarray) -> None:
    assert mutual_information(table) == pytest.approx(naive(table), abs=1e-9)
    assert mutual_information(table) == pytest.approx(mutual_information(table.T), abs=1e-9)


def test_entropy_is_log2_of_as_many_equal_choices() -> None:
    assert entropy(np.full(8, 5)) == pytest.approx(3)
    assert entropy(np.array([0, 7, 0])) == 0
    assert entropy(np.zeros(3, np.int64)) == 0


def test_a_next_expert_that_follows_from_the_current_is_worth_its_whole_entropy() -> None:
    first = np.repeat(np.arange(16), 100)
    found = affinity_information(transitions(first, (first * 5 + 3) % 16, 16), seed=0)
    assert found.bits.tolist() == pytest.approx([4])
    assert 0 < found.shuffled[0] < 0.3
    assert found.excess.tolist() == pytest.approx(4 - found.shuffled)


def test_independent_layers_are_within_the_spread_of_the_null() -> None:
    rng = np.random.default_rng(0)
    skewed = rng.dirichlet(np.full(32, 0.3))
    tables = [transitions(rng.choice(32, 3000, p=skewed), rng.choice(32, 3000, p=skewed[::-1]), 32) for _ in range(20)]
    found = affinity_information(np.concatenate(tables), seed=1, draws=50)
    assert np.abs(found.excess / found.spread).mean() < 1.5
    assert np.abs(found.excess).max() < 5 * found.spread.max()
    assert found.bits.min() > 0.05  # the plain estimate alone would claim a dependence


def test_the_null_is_that_of_tokens_shuffled_one_by_one() -> None:
    rng = np.random.default_rng(0)
    first = rng.choice(6, 400, p=rng.dirichlet(np.ones(6)))
    following = np.where(rng.random(400) < 0.5, first, rng.integers(6, size=400))
    found = affinity_information(transitions(first, following, 6), seed=2, draws=300)
    shuffled = [mutual_information(transitions(first, rng.permutation(following), 6)[0]) for _ in range(300)]
    assert found.shuffled[0] == pytest.approx(np.mean(shuffled), rel=0.05)
    assert found.spread[0] == pytest.approx(np.std(shuffled), rel=0.25)
    assert found.excess[0] > 10 * found.spread[0]


def test_the_spread_is_what_a_few_draws_show_of_all_there_could_be() -> None:
    assert Information.of([(0.0, [1.0, 3.0])]).spread.tolist() == pytest.approx([math.sqrt(2)])


def test_a_seed_gives_the_same_null_again_and_nothing_routed_gives_zeros() -> None:
    rng = np.random.default_rng(0)
    table = transitions(rng.integers(5, size=200), rng.integers(5, size=200), 5)
    assert affinity_information(table, seed=7).shuffled == affinity_information(table, seed=7).shuffled
    assert affinity_information(table, seed=7).shuffled != affinity_information(table, seed=8).shuffled
    empty = affinity_information(np.zeros((2, 4, 4), np.int64), seed=0)
    assert (empty.bits.tolist(), empty.shuffled.tolist()) == ([0, 0], [0, 0])
    assert affinity_information(np.zeros((0, 4, 4), np.int64), seed=0).bits.shape == (0,)
