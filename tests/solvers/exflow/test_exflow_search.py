from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray

from moeplan.solvers.exflow import methods, sweeps
from moeplan.solvers.exflow.budget import Budget, block_work, layer_work, naming_work
from moeplan.solvers.exflow.methods import improve, staged
from moeplan.solvers.exflow.programme import Incumbent, Layout, Programme, Terms
from moeplan.solvers.exflow.sweeps import chain, polish, relabel, search, sweep
from tests.solvers.builders import TWO_NODES, Array, brute_force, programme_of, skewed


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


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(2, 4))
def test_with_one_expert_a_device_the_chain_is_optimal(seed: int, num_layers: int, num_experts: int) -> None:
    rng = np.random.default_rng(seed)
    weights = skewed(rng, num_layers, num_experts)
    programme = programme_of(weights, [1] * num_experts)
    layout = chain(programme, int(rng.integers(num_layers)), Budget(1e9, 1e6), rng)
    assert programme.value(layout) == brute_force(weights, [1] * num_experts, programme.near)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([[4, 4, 4, 4], [5, 1, 7, 3], [6, 6, 6, 6], [0, 16, 2, 9]]), st.booleans())
def test_sweeps_and_relabelling_never_lose_value_nor_leave_slots(seed: int, slots: list[int], two_nodes: bool) -> None:
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


def test_relabelling_undoes_any_renaming_that_the_links_are_blind_to(rng: Generator) -> None:
    programme = programme_of(np.stack([np.kron(np.eye(4), np.ones((2, 2)))] * 2), [2, 2, 2, 2], TWO_NODES, 2)
    layout = programme.first_layout()
    best = programme.value(layout)
    layout[1:] = [np.array([3, 2, 0, 1])[device] for device in layout[1:]]
    assert programme.value(layout) < best
    assert relabel(programme, layout, Budget(1e9, 1e6))
    assert programme.value(layout) == best


@pytest.mark.parametrize(("near", "group"), [(np.eye(2), 2), (5 * np.eye(2), 1)])
def test_the_search_finds_the_optimum_of_small_programmes(rng: Generator, near: Array, group: int) -> None:
    for slots in ([2, 2], [3, 1], [3, 2]):
        weights = skewed(rng, 4, 4)
        programme = programme_of(weights, slots, near, group)
        incumbent = Incumbent(programme)
        search(programme, Terms(), Budget(2e7, 1e6), rng, incumbent)
        assert incumbent.value == pytest.approx(brute_force(weights, slots, near))


def test_kicks_gain_over_polished_chains(rng: Generator) -> None:
    programme = programme_of(skewed(rng, 8, 16), [4, 4, 4, 4])
    budget = Budget(1e9, 1e6)
    layout = chain(programme, 0, budget, rng)
    polish(programme, layout, budget)
    incumbent = Incumbent(programme)
    search(programme, Terms(), Budget(2e8, 1e6), rng, incumbent)
    assert incumbent.value > programme.value(layout)
    assert incumbent.value == pytest.approx(value_by_loops(programme, incumbent.layout))


def test_the_staged_layout_puts_experts_that_share_a_node_first(rng: Generator) -> None:
    blocks = np.kron(np.eye(2), np.ones((4, 4))) * 10 + np.kron(np.eye(4), np.ones((2, 2)))
    mixed = [rng.permutation(8) for _ in range(4)]
    weights = np.stack([blocks[np.ix_(mixed[cut], mixed[cut + 1])] for cut in range(3)])
    programme = programme_of(weights, [2, 2, 2, 2], TWO_NODES, 2)
    layout, stages = staged(programme, Terms(), Budget(1e8, 1e6), rng, improve)
    best = [np.arange(8)[order] // 2 for order in mixed]
    assert programme.value(layout) == pytest.approx(programme.value(best))
    assert stages[0].inter_hops == stages[1].inter_hops == pytest.approx(1 - kept_on_nodes(programme, best))


def devices(num_devices: int = 4, group: int | None = None) -> Programme:
    """Five layers on devices of four experts each."""
    rows = np.random.default_rng(0).dirichlet(np.full(4 * num_devices, 0.2), (4, 4 * num_devices))
    return programme_of(rows, [4] * num_devices, None, group)


def spent(budget: Budget) -> float:
    return budget.total - budget.left


def rng_of() -> Generator:
    return np.random.default_rng(1)


def test_work_grows_with_cells_and_places_and_with_pairs_of_nodes() -> None:
    assert layer_work(32, 64) == 30_000 + 32 * 64 * (15 + 64 / 40)
    assert naming_work(devices(8, 2)) == 24_000 + 17 * 6_000 + 16 * 4 * 15.05 + 16 * 15.1 + 4 * 32**2
    assert naming_work(devices(8, 1)) == naming_work(devices(8))  # nodes of one device are devices


def test_a_block_move_of_a_part_of_the_experts_costs_more_the_more_there_are_to_choose_from() -> None:
    def a_layer(slots: list[int]) -> float:
        sizes, near = (sum(slots),) * 3, np.eye(len(slots))
        programmes = (Programme([], sizes[:n], np.array(slots), near, len(slots)) for n in (2, 3))
        two, three = map(block_work, programmes)
        assert three / 3 < two / 2
        return three - two

    assert a_layer([2, 0, 2]) == pytest.approx(400 + 0.05 * 4 * 4 + 20 * 6 + 0.12 * 36)
    assert a_layer([4, 4]) == pytest.approx(400 + 0.05 * 8 * 16 + 20 * 70 + 0.12 * 70**2)
    dealt = 400 + 0.05 * 26 * 16 + 20 * 70 + 0.12 * 70**2
    assert a_layer([16, 10]) == pytest.approx(dealt + 9 * 26 + 12 * 64 + 4 * 70)


def test_every_layer_of_a_chain_is_charged_and_a_spent_budget_ends_what_comes_after() -> None:
    programme, budget = devices(), Budget(1.0, 1e6)
    layout = chain(programme, 2, budget, rng_of())
    assert spent(budget) == 4 * layer_work(16, 16)
    assert all(np.bincount(home_E).tolist() == [4] * 4 for home_E in layout)
    before = list(layout)
    polish(programme, layout, budget)
    assert all(now_E is was_E for now_E, was_E in zip(layout, before, strict=True))
    assert not relabel(programme, layout, budget)
    assert spent(budget) == 4 * layer_work(16, 16)


def test_names_of_devices_are_charged_by_layer_pairs() -> None:
    programme, budget = devices(), Budget(1e12, 1e6)
    relabel(programme, programme.first_layout(), budget)
    assert spent(budget) == 4 * naming_work(programme)


def test_recombining_is_charged_by_pairs_of_layouts_and_layers() -> None:
    from moeplan.solvers.exflow.rounds import _Rounds

    programme, budget = devices(), Budget(1e12, 1e6)
    rounds = _Rounds(programme, Terms(), budget, rng_of(), Incumbent(programme))
    rounds._recombine([programme.first_layout(), chain(programme, 0, Budget(0, 1e6), rng_of())])
    assert spent(budget) == 2**2 * 4 * naming_work(programme)


def test_the_start_of_an_annealing_takes_three_tenths_of_the_work_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def polished(_: Programme, layout: list[NDArray[np.int64]], budget: Budget) -> None:
        given.append((budget.total, budget.remaining_s))
        budget.spend(7.0)

    monkeypatch.setattr(sweeps, "polish", polished)
    monkeypatch.setattr(methods, "anneal", lambda *_: None)
    programme, budget = devices(), Budget(1e9, 1e6)
    improve(programme, Terms(), budget, rng_of(), Incumbent(programme))
    assert given == [(pytest.approx(3e8), pytest.approx(0.3**0.5 * 1e6, rel=1e-3))]
    assert spent(budget) == pytest.approx(4 * layer_work(16, 16) + 7)
