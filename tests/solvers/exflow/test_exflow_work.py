from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.solvers.exflow import methods, sweeps
from moeplan.solvers.exflow.budget import Budget, block_work, layer_work, naming_work
from moeplan.solvers.exflow.methods import improve
from moeplan.solvers.exflow.programme import Incumbent, Programme, Terms
from moeplan.solvers.exflow.sweeps import chain, polish, relabel


def programme_of(num_devices: int = 4, group: int | None = None, num_layers: int = 5) -> Programme:
    rng, size = np.random.default_rng(0), 4 * num_devices
    weights = [rng.dirichlet(np.full(size, 0.2), size) for _ in range(num_layers - 1)]
    slots = np.full(num_devices, 4)
    return Programme(weights, (size,) * num_layers, slots, np.eye(num_devices), group or num_devices)


def spent(budget: Budget) -> float:
    return budget.total - budget.left


def rng_of() -> np.random.Generator:
    return np.random.default_rng(1)


def test_work_grows_with_cells_and_places_and_with_pairs_of_nodes() -> None:
    assert layer_work(32, 64) == 30_000 + 32 * 64 * (15 + 64 / 40)
    assert naming_work(programme_of(8, 2)) == 24_000 + 17 * 6_000 + 16 * 4 * 15.05 + 16 * 15.1 + 4 * 32**2
    assert naming_work(programme_of(8, 1)) == naming_work(programme_of(8))  # nodes of one device are devices


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
    programme, budget = programme_of(), Budget(1.0, 1e6)
    layout = chain(programme, 2, budget, rng_of())
    assert spent(budget) == 4 * layer_work(16, 16)
    assert all(np.bincount(home_E).tolist() == [4] * 4 for home_E in layout)
    before = list(layout)
    polish(programme, layout, budget)
    assert all(now_E is was_E for now_E, was_E in zip(layout, before, strict=True))
    assert not relabel(programme, layout, budget)
    assert spent(budget) == 4 * layer_work(16, 16)


def test_names_of_devices_are_charged_by_layer_pairs() -> None:
    programme, budget = programme_of(), Budget(1e12, 1e6)
    relabel(programme, programme.first_layout(), budget)
    assert spent(budget) == 4 * naming_work(programme)


def test_recombining_is_charged_by_pairs_of_layouts_and_layers() -> None:
    from moeplan.solvers.exflow.rounds import _Rounds

    programme, budget = programme_of(), Budget(1e12, 1e6)
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
    programme, budget = programme_of(), Budget(1e9, 1e6)
    improve(programme, Terms(), budget, rng_of(), Incumbent(programme))
    assert given == [(pytest.approx(3e8), pytest.approx(0.3**0.5 * 1e6, rel=1e-3))]
    assert spent(budget) == pytest.approx(4 * layer_work(16, 16) + 7)
