import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.solvers.bounds.groups import climb, met, search

Array = NDArray[Any]

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


@pytest.mark.parametrize(("num_experts", "size", "sides"), [(6, 2, 2), (6, 3, 1), (8, 4, 2), (9, 3, 2), (5, 1, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_worthiest_group_of_every_expert(
    num_experts: int, size: int, sides: int, seed: int
) -> None:
    worth = np.random.default_rng(seed).normal(0, 1, (num_experts, sides * num_experts))
    groups = first_groups(num_experts, size)
    value = climb(worth, sides, groups)
    best = best_by_enumeration(worth, sides, size)
    assert (value <= best + 1e-9).all()
    missed, _ = search(worth, sides, groups, value, ALL_NODES, GO)
    assert value == pytest.approx(best)
    assert missed == -1e300
    for expert, group in enumerate(groups):
        assert expert in group
        assert worth_of(worth, sides, tuple(group)) == pytest.approx(best[expert])


@pytest.mark.parametrize("most_nodes", [1, 5, 25, 100])
def test_a_search_cut_short_says_how_much_it_may_have_missed(most_nodes: int, rng: np.random.Generator) -> None:
    worth = rng.exponential(1, (10, 20))
    groups = first_groups(10, 4)
    value = climb(worth, 2, groups)
    missed, nodes = search(worth, 2, groups, value, most_nodes, GO)
    assert nodes <= most_nodes
    assert (np.maximum(value, missed) >= best_by_enumeration(worth, 2, 4) - 1e-9).all()


def test_a_search_that_is_stopped_ends_at_once_and_its_bound_holds(rng: np.random.Generator) -> None:
    worth = rng.exponential(1, (32, 64))
    groups = first_groups(32, 12)
    value = climb(worth, 2, groups)
    missed, nodes = search(worth, 2, groups, value, ALL_NODES, np.ones(1, bool))
    assert nodes == 0
    for group in (rng.choice(32, 12, replace=False) for _ in range(100)):
        assert worth_of(worth, 2, tuple(group)) <= min(np.maximum(value, missed)[group])


@pytest.mark.parametrize("worth", [np.zeros((6, 12)), np.ones((6, 12)), np.kron(np.eye(3), np.ones((2, 4)))])
def test_ties_are_worth_what_they_are(worth: Array) -> None:
    groups = first_groups(6, 2)
    value = climb(worth, 2, groups)
    search(worth, 2, groups, value, ALL_NODES, GO)
    assert value == pytest.approx(best_by_enumeration(worth, 2, 2))


def test_a_climb_leaves_no_group_that_another_turn_improves(rng: np.random.Generator) -> None:
    worth = rng.normal(0, 1, (8, 16))
    groups = first_groups(8, 3)
    value = climb(worth, 2, groups)
    for expert, group in enumerate(groups):
        assert expert in group
        assert worth_of(worth, 2, tuple(group)) == pytest.approx(value[expert])
    assert climb(worth, 2, groups.copy()) == pytest.approx(value)


def test_who_meets_whom_is_counted_over_all_groups(rng: np.random.Generator) -> None:
    worth, groups = rng.normal(0, 1, (6, 12)), first_groups(6, 2)
    expected = np.zeros((6, 12))
    for group in groups:
        sums = worth[group].sum(axis=0)
        beside = [*np.argsort(sums[:6])[-2:], *(6 + np.argsort(sums[6:])[-2:])]
        expected[np.ix_(group, beside)] += 1
    assert (met(worth, 2, groups) == expected).all()
