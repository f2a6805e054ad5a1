import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.solvers.bounds import kept_bound, row_bound, spectral_bound, transportation_bound

Array = NDArray[Any]
BruteForce = Callable[[Array, list[int], Array], float]

SLOTS = [[2, 2], [3, 1], [1, 1, 2], [1, 1, 1, 1], [4, 0], [2, 3], [2, 2, 2]]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SLOTS), st.integers(0, 2**32), st.sampled_from([1.0, 1e-7, 3e13]))
def test_no_placement_keeps_more_than_any_bound(
    brute_force: BruteForce, slots: list[int], seed: int, scale: float
) -> None:
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
def test_no_placement_with_replicas_keeps_more_than_the_bound(slots: list[int], rng: np.random.Generator) -> None:
    weight = rng.dirichlet(np.full(3, 0.4), 3)
    choices = itertools.product(*(itertools.combinations(range(3), s) for s in slots))
    layers = [held for held in choices if {e for device in held for e in device} == {0, 1, 2}]
    best = max(keep_with_replicas(weight, here, there) for here in layers for there in layers)
    assert kept_bound(weight[None], np.array(slots)).value >= best - 1e-12


def test_one_expert_a_device_makes_the_transportation_bound_the_assignment(rng: np.random.Generator) -> None:
    weight = rng.integers(0, 100, (5, 5)).astype(float)
    assert transportation_bound(weight, np.ones(5, np.int64)) == max(
        sum(weight[a, p[a]] for a in range(5)) for p in itertools.permutations(range(5))
    )


def test_the_spectral_bound_of_equal_slots_is_the_published_one_and_can_be_the_better(rng: np.random.Generator) -> None:
    weight = rng.normal(5, 0.3, (48, 48))
    centre = np.eye(48) - 1 / 48
    singular = np.linalg.svd(centre @ weight @ centre, compute_uv=False)
    slots = np.full(4, 12)
    assert spectral_bound(weight, slots) == pytest.approx(weight.sum() / 4 + 12 * singular[:3].sum())
    assert spectral_bound(weight, slots) < transportation_bound(weight, slots)
    assert kept_bound(weight[None], slots).kind == "spectral"


def test_block_structure_is_bounded_by_what_it_keeps() -> None:
    weight = np.kron(np.eye(3), np.ones((2, 2)))
    assert kept_bound(np.stack([weight, weight]), np.full(3, 2)).value == 2 * weight.sum()


def test_the_row_bound_lets_every_expert_meet_its_heaviest_transitions(rng: np.random.Generator) -> None:
    weight = rng.integers(0, 100, (6, 6)).astype(float)
    by_loops = [sum(sum(sorted(row)[-3:]) for row in w.tolist()) for w in (weight, weight.T)]
    assert row_bound(weight, np.array([3, 2, 1])) == pytest.approx(min(by_loops), rel=1e-11)
    assert row_bound(weight, np.array([3, 2, 2])) == weight.sum()


def test_layer_pairs_that_time_does_not_reach_get_the_row_bound(rng: np.random.Generator) -> None:
    weights, slots = rng.dirichlet(np.full(8, 0.3), (3, 8)), np.full(4, 2)
    late = kept_bound(weights, slots, time_limit_s=0)
    assert late.kind == "row"
    assert late.value == pytest.approx(sum(row_bound(weight, slots) for weight in weights))
    assert late.value > kept_bound(weights, slots).value


def test_many_experts_have_the_same_spectral_bound_within_a_millionth_and_not_below(rng: np.random.Generator) -> None:
    weight = rng.dirichlet(np.full(96, 0.1), 96)
    centred = weight - weight.mean(axis=0) - weight.mean(axis=1, keepdims=True) + weight.mean()
    exact = weight.sum() / 48 + 2 * np.linalg.svd(centred, compute_uv=False)[:47].sum()
    assert exact <= spectral_bound(weight, np.full(48, 2)) <= exact * (1 + 1e-6)
