import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.methods import improve, staged
from moeplan.solvers.exflow.programme import Incumbent, Layout, Programme, Terms
from moeplan.solvers.exflow.sweeps import chain, polish, relabel, search, sweep

Array = NDArray[Any]
BruteForce = Callable[[Array, list[int], Array], float]
TWO_NODES = 8.0 - np.array([[0, 1, 8, 8], [1, 0, 8, 8], [8, 8, 0, 1], [8, 8, 1, 0]])


def programme_of(weights: Array, slots: list[int], near: Array | None = None, group: int | None = None) -> Programme:
    near = np.eye(len(slots)) if near is None else near
    sizes = (weights.shape[1],) * (len(weights) + 1)
    return Programme(list(weights.astype(float)), sizes, np.array(slots), near, group or len(slots))


def value_by_loops(programme: Programme, layout: Layout) -> float:
    return sum(
        float(weight[a, b] * programme.near[layout[cut][a], layout[cut + 1][b]])
        for cut, weight in enumerate(programme.weights)
        for a in range(len(weight))
        for b in range(weight.shape[1])
    )


def kept_on_nodes(programme: Programme, layout: Layout) -> float:
    cuts = list(enumerate(programme.weights))
    kept = sum(float(w[layout[cut][:, None] // 2 == layout[cut + 1] // 2].sum()) for cut, w in cuts)
    return kept / sum(float(w.sum()) for _, w in cuts)


def skewed(rng: np.random.Generator, num_layers: int, num_experts: int) -> Array:
    rows = rng.dirichlet(np.full(num_experts, 0.2), (num_layers - 1, num_experts))
    return np.asarray(rng.poisson(rows * 200))


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(2, 4))
def test_with_one_expert_a_device_the_chain_is_optimal(
    brute_force: BruteForce, seed: int, num_layers: int, num_experts: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = skewed(rng, num_layers, num_experts)
    programme = programme_of(weights, [1] * num_experts)
    layout = chain(programme, int(rng.integers(num_layers)), Budget(1e9, 1e6), rng)
    assert programme.value(layout) == brute_force(weights, [1] * num_experts, programme.near)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([[4, 4, 4, 4], [5, 1, 7, 3], [6, 6, 6, 6], [0, 16, 2, 9]]), st.booleans())
def test_sweeps_and_relabelling_never_lose_value_and_stay_in_the_slots(
    seed: int, slots: list[int], two_nodes: bool
) -> None:
    rng = np.random.default_rng(seed)
    near, group = (TWO_NODES, 2) if two_nodes else (None, None)
    programme = programme_of(skewed(rng, 5, 16), slots, near, group)
    budget = Budget(1e9, 1e6)
    layout = chain(programme, 2, budget, rng)
    values = [programme.value(layout)]
    for step in (
        lambda: sweep(programme, layout, budget, [1, 3]),
        lambda: relabel(programme, layout, budget),
        lambda: polish(programme, layout, budget),
    ):
        step()
        values.append(programme.value(layout))
        assert all((np.bincount(device, minlength=4) <= slots).all() for device in layout)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(value_by_loops(programme, layout))


def test_relabelling_undoes_any_renaming_that_the_links_are_blind_to(rng: np.random.Generator) -> None:
    programme = programme_of(np.stack([np.kron(np.eye(4), np.ones((2, 2)))] * 2), [2, 2, 2, 2], TWO_NODES, 2)
    layout = programme.first_layout()
    best = programme.value(layout)
    layout[1:] = [np.array([3, 2, 0, 1])[device] for device in layout[1:]]
    assert programme.value(layout) < best
    assert relabel(programme, layout, Budget(1e9, 1e6))
    assert programme.value(layout) == best


def test_relabelling_leaves_devices_with_different_slots_apart(rng: np.random.Generator) -> None:
    programme = programme_of(skewed(rng, 4, 6), [3, 2, 1])
    layout = [rng.permutation(programme.places) for _ in range(4)]
    relabel(programme, layout, Budget(1e9, 1e6))
    assert all(np.bincount(device).tolist() == [3, 2, 1] for device in layout)


@pytest.mark.parametrize(("near", "group"), [(np.eye(2), 2), (5 * np.eye(2), 1)])
def test_the_search_finds_the_optimum_of_small_programmes(
    brute_force: BruteForce, rng: np.random.Generator, near: Array, group: int
) -> None:
    for slots in ([2, 2], [3, 1], [3, 2]):
        weights = skewed(rng, 4, 4)
        programme = programme_of(weights, slots, near, group)
        incumbent = Incumbent(programme)
        search(programme, Terms(), Budget(2e7, 1e6), rng, incumbent)
        assert incumbent.value == pytest.approx(brute_force(weights, slots, near))


def test_kicks_gain_over_polished_chains(rng: np.random.Generator) -> None:
    programme = programme_of(skewed(rng, 8, 16), [4, 4, 4, 4])
    budget = Budget(1e9, 1e6)
    layout = chain(programme, 0, budget, rng)
    polish(programme, layout, budget)
    incumbent = Incumbent(programme)
    search(programme, Terms(), Budget(2e8, 1e6), rng, incumbent)
    assert incumbent.value > programme.value(layout)
    assert incumbent.value == pytest.approx(value_by_loops(programme, incumbent.layout))


def test_the_staged_layout_puts_experts_that_share_a_node_first(rng: np.random.Generator) -> None:
    blocks = np.kron(np.eye(2), np.ones((4, 4))) * 10 + np.kron(np.eye(4), np.ones((2, 2)))
    mixed = [rng.permutation(8) for _ in range(4)]
    weights = np.stack([blocks[np.ix_(mixed[cut], mixed[cut + 1])] for cut in range(3)])
    programme = programme_of(weights, [2, 2, 2, 2], TWO_NODES, 2)
    layout, stages = staged(programme, Terms(), Budget(1e8, 1e6), rng, improve)
    best = [np.arange(8)[order] // 2 for order in mixed]
    assert programme.value(layout) == pytest.approx(programme.value(best))
    assert stages[0].inter_hops == stages[1].inter_hops == pytest.approx(1 - kept_on_nodes(programme, best))


def test_a_spent_deadline_stops_a_search_at_once(rng: np.random.Generator) -> None:
    programme = programme_of(skewed(rng, 24, 64), [8] * 8)
    started, incumbent = time.perf_counter(), Incumbent(programme)
    search(programme, Terms(), Budget(1e12, 0.2), rng, incumbent)
    assert time.perf_counter() - started < 60
