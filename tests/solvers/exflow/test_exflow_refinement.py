import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.solvers.compiled import COMPILED
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.exflow.refinement import MERGE_WORK, num_parts, refined
from moeplan.solvers.exflow.terms import Terms

if not COMPILED:
    pytest.skip("numba is not installed", allow_module_level=True)

from moeplan.solvers.exflow.rounds import anneal_rounds


def programme_of(slots: list[int], near: NDArray[Any] | None = None, group: int | None = None) -> Programme:
    near = np.eye(len(slots)) if near is None else near
    return Programme([], (sum(slots),), np.array(slots), near, group or len(slots))


@pytest.mark.parametrize(
    ("slots", "parts"),
    [([8, 8], 2), ([32, 32], 8), ([12, 12], 3), ([4, 4], 1), ([7, 7], 1), ([10, 10], 5), ([8, 9], 1)],
)
def test_devices_are_cut_into_the_fewest_equal_parts_of_two_to_four(slots: list[int], parts: int) -> None:
    assert num_parts(programme_of(slots), Terms(), 4) == parts


def test_nothing_is_cut_under_caps_or_two_levels_of_links() -> None:
    capped = Terms(load=np.ones((1, 16)), cap=np.full(1, 99.0))
    assert num_parts(programme_of([8, 8]), capped, 4) == 1
    near = np.kron(np.eye(2), np.ones((2, 2))) + np.eye(4)
    assert num_parts(programme_of([8, 8, 8, 8], near, 2), Terms(), 4) == 1
    assert num_parts(programme_of([8, 8, 8, 8], np.eye(4), 2), Terms(), 4) == 2


def test_putting_parts_together_is_paid_for_and_is_the_same_work_again() -> None:
    rng, spent = np.random.default_rng(0), list[float]()
    weights = [rng.integers(0, 9, (16, 16)).astype(float) for _ in range(3)]
    programme = Programme(weights, (16,) * 4, np.array([8, 8]), np.eye(2), 2)

    def search(programme: Programme, terms: Terms, budget: Budget, *_: object) -> None:
        budget.spend(budget.left / 2)
        spent.append(budget.total - budget.left)

    left = []
    for work in (1e6, 1e9):
        budget = Budget(work, 1e6)
        refined(programme, Terms(), 2, budget, rng, search)
        left.append(budget.left)
    assert spent == [5e5, 5e5, 5e8, MERGE_WORK / 2]
    assert left == [0, 5e8 - MERGE_WORK / 2]


@pytest.mark.parametrize("pairs", [False, True])
def test_parts_that_belong_together_come_together(pairs: bool) -> None:
    rng = np.random.default_rng(0)
    block = np.kron(np.eye(4), np.full((4, 4), 9.0)) + np.kron(np.eye(2), np.ones((8, 8)))
    order = [rng.permutation(16) for _ in range(4)]
    weights = [block[np.ix_(here, there)] for here, there in itertools.pairwise(order)]
    beside = np.stack([block[np.ix_(one, one)] for one in order])
    terms = Terms(beside=beside if pairs else None)
    programme = Programme(weights, (16,) * 4, np.array([8, 8]), np.eye(2), 2)
    layout = refined(programme, terms, 2, Budget(5e7, 1e6), rng, anneal_rounds)
    best = [one // 8 for one in order]
    assert terms.value(programme, layout) == terms.value(programme, best)
    assert all(np.bincount(device).tolist() == [8, 8] for device in layout)
