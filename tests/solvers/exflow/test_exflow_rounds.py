import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.assignment import assign_places
from moeplan.solvers.exflow import rounds
from moeplan.solvers.exflow.budget import COLD, COLDER, HOTTER, Budget, Cooling
from moeplan.solvers.exflow.programme import Incumbent, Layout, Programme, Terms
from moeplan.solvers.exflow.rounds import anneal_rounds, compile_rounds
from tests.solvers.builders import Array

Gain = Callable[[int], float]


def programme_of(slots: list[int], num_layers: int = 4, seed: int = 0) -> Programme:
    num_experts, rng = sum(slots), np.random.default_rng(seed)
    weights = [rng.integers(0, 50, (num_experts, num_experts)).astype(float) for _ in range(num_layers - 1)]
    return Programme(weights, (num_experts,) * num_layers, np.array(slots), np.eye(len(slots)), len(slots))


def blocks(num_layers: int = 4) -> tuple[Programme, Layout]:
    """Four groups of two experts that follow each other, and the best layout, which keeps all."""
    weights: list[Array] = [np.kron(np.eye(4), np.ones((2, 2)))] * (num_layers - 1)
    programme = Programme(weights, (8,) * num_layers, np.full(4, 2), np.eye(4), 4)
    return programme, programme.first_layout()


def new_rounds(programme: Programme, budget: Budget, incumbent: Incumbent | None = None) -> rounds._Rounds:
    rng = np.random.default_rng(0)
    return rounds._Rounds(programme, Terms(), budget, rng, incumbent or Incumbent(programme))


HOT = Cooling(programme_of([2] * 4), Terms(), 1.0)
REHEATS = 4  # without gain: 0.2 of the work of the start, then 1.3 times as much each, below 0.5


def noting(seen: list[Any], given: slice, steep: float = 0.0) -> Callable[..., float]:
    """An annealing that only notes some of what it is given; a block move has so many steep pairs of ways."""

    def anneal(*arguments: Any) -> float:
        seen.append(arguments[given])
        return steep * float(arguments[2])

    return anneal


class Book(rounds._Rounds):
    """Rounds that write down what they are asked for, the work of starts spent and the others' not."""

    entries: list[tuple[str, float, float, float]]  # what, its work, what it leaves, what is left before it
    gain: Gain

    def start(self, work: float) -> None:
        self.entries.append(("start", work, 0.0, self._budget.left))
        self._budget.spend(work)
        self._incumbent.value += self.gain(len(self.entries))

    def reheat(self, work: float, most: float, last: float) -> None:
        assert most in (pytest.approx(2.5 * work), np.inf)
        assert (most == np.inf) <= (last == 0)  # a long round's, which leaves nothing to others
        self.entries.append(("reheat", work, last, self._budget.left))


def booked(
    monkeypatch: pytest.MonkeyPatch, work: float, gain: Gain = lambda _: 0.0, *, fresh: bool = True
) -> list[tuple[str, float, float, float]]:
    """What rounds ask for."""
    monkeypatch.setattr(rounds, "_Rounds", Book)
    monkeypatch.setattr(Book, "entries", [], raising=False)
    monkeypatch.setattr(Book, "gain", staticmethod(gain), raising=False)
    programme = programme_of([2] * 4)
    anneal_rounds(programme, Terms(), Budget(work, 600), np.random.default_rng(0), Incumbent(programme), fresh=fresh)
    return Book.entries


def test_what_is_compiled_is_compiled_by_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal is heard there; it would wait for other threads until they are done."""
    callers: dict[str, list[threading.Thread]] = {"anneal": [], "descend": []}

    def noted(called: list[threading.Thread], kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called.append(threading.current_thread())
            return kernel(*args)

        return call

    for name, called in callers.items():
        monkeypatch.setattr(rounds, name, noted(called, getattr(rounds, name)))
    compile_rounds()
    for called in callers.values():
        assert called[0] is threading.current_thread()
        assert len({*called}) > 1


def test_fresh_starts_grow_after_a_quick_one_until_four_rounds_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = booked(monkeypatch, 1e15)
    assert [what for what, *_ in entries] == ["start", *["start", "reheat"] * 4, "reheat"]
    quick, *starts = [work for what, work, *_ in entries if what == "start"]
    assert quick == pytest.approx(starts[0] / 16)
    assert starts == pytest.approx([starts[0] * 2**i for i in range(4)])
    reheats = [work for what, work, *_ in entries if what == "reheat"]
    assert reheats == pytest.approx([length * 0.2 for length in [*starts, starts[-1] * 2]])


def test_a_gain_starts_the_patience_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = booked(monkeypatch, 1e15, lambda entry: float(entry == 8))  # the fourth round's start
    assert sum(what == "start" for what, *_ in entries) == 1 + 4 + 4


def test_where_few_starts_fit_one_takes_four_to_six_tenths_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    length, quick = 16 * booked(monkeypatch, 1e15)[0][1], 1 / 16
    for left, expected in ((101, 1), (99, 0.4 * 99), (2, 1), (0.5 - quick, 0.6 * (0.5 - 0.6 * 0.5 * quick))):
        _, (_, start, *_), (_, reheat, leaves, _), *_ = booked(monkeypatch, (quick + left) * length)
        assert start == pytest.approx(expected * length)
        assert reheat == pytest.approx(0.2 * min(start, length))
        assert (leaves > 0) == (left > 100)  # a long round's leave nothing


def test_rounds_leave_three_tenths_of_the_work_to_the_last_reheat_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 200 * 16 * booked(monkeypatch, 1e15)[0][1]
    *before, (what, _, leaves, left) = booked(monkeypatch, total, float)  # every entry gains
    assert (what, leaves) == ("reheat", 0)
    assert 0 < left <= 0.3 * total
    for what, work, leaves, left in before[1:]:
        if what == "start":
            assert left > 0.3 * total
            assert work <= 0.6 * left
        else:
            assert leaves == pytest.approx(0.3 * total)
    *_, (_, work, _, left), _ = before
    assert work == pytest.approx(0.6 * left)  # less than the last start would have liked


def test_without_fresh_starts_there_is_one_reheat_with_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(what, leaves) for what, _, leaves, _ in booked(monkeypatch, 1e9, fresh=False)] == [("reheat", 0)]


def test_the_last_reheat_begins_with_the_best_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    programme, best = blocks()
    bad = [np.roll(device_E, layer) for layer, device_E in enumerate(best)]
    heated: list[float] = []

    def cooled(self: rounds._Rounds, cooling: Cooling, work: float) -> list[Layout]:
        self._budget.spend(work)
        heated.append(programme.value(self._layout))
        return [bad]

    monkeypatch.setattr(rounds._Rounds, "_cooled", cooled)
    monkeypatch.setattr(rounds, "recombine", lambda *given: given[2][0])
    incumbent = Incumbent(programme, start=best)
    anneal_rounds(programme, Terms(), Budget(1e15, 600), np.random.default_rng(0), incumbent)
    assert incumbent.value == programme.value(best) == 48
    assert programme.value(bad) < 48
    reheats = 1 + 4 * (1 + REHEATS)  # the quick start's, then every round's start and reheats
    assert heated[2] < 48  # a reheat of the first round
    assert heated[reheats:] == [48] * REHEATS


def test_a_reheat_recombines_what_the_threads_find(monkeypatch: pytest.MonkeyPatch) -> None:
    programme, best = blocks()
    other = np.array([3, 1, 2, 0])  # the same partition by other names
    wrong = np.tile(np.arange(4), 2)
    halves: list[Layout] = [[best[0], best[1], wrong, wrong], [wrong, wrong, other[best[2]], other[best[3]]]]

    def cooled(self: rounds._Rounds, cooling: Cooling, work: float) -> list[Layout]:
        self._budget.spend(self._budget.left)
        return halves

    monkeypatch.setattr(rounds._Rounds, "_cooled", cooled)
    incumbent = Incumbent(programme, start=[wrong] * 4)
    new_rounds(programme, Budget(1e9, 600), incumbent).reheat(1e6, 2e6, 0.0)
    assert max(programme.value(half) for half in halves) < incumbent.value == 48


def test_a_reheat_is_warm_enough_to_move_experts_and_too_cold_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "WORKERS", 1)
    ends: list[float] = []
    acts: list[Callable[[rounds._Rounds], None]] = [lambda it: it.start(1e8), lambda it: it.reheat(1e8, 2e8, 9e8)]
    for act in acts:
        seen = list[Any]()
        monkeypatch.setattr(rounds, "anneal", noting(seen, slice(3, 5)))
        act(new_rounds(blocks()[0], Budget(1e9, 600)))
        ends += [seen[0][0] / 0.5, seen[-1][1] / 0.5]  # in units of the weights: every expert goes to two of eight
    hot, cold, warm, end = ends
    assert cold == pytest.approx(end)
    assert 1.5 * cold < warm < hot / 1.2
    assert [hot, cold] == pytest.approx([1.25, 0.5], rel=0.01)


@pytest.mark.parametrize(("second", "chunks", "capped"), [(0, 16, False), (300, 16, False), (2000, 3, True)])
def test_a_clock_ahead_of_work_ends_cooling(
    monkeypatch: pytest.MonkeyPatch, second: int, chunks: int, capped: bool
) -> None:
    clock, seen = itertools.count(0, second), list[Any]()
    budget = Budget(1e9, 6e4)  # a hundredth of the work may take a tenth of the time: 375 s a chunk
    monkeypatch.setattr(rounds, "WORKERS", 1)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(rounds, "anneal", noting(seen, slice(3, 5)))
    new_rounds(programme_of([2] * 4), budget)._cooled(HOT, 1e7)
    assert (len(seen), budget.capped) == (chunks, capped)


def test_nothing_is_done_or_charged_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    programme = programme_of([2] * 4)
    for budget in (Budget(0, 600), Budget(1e9, 0)):
        left = budget.left
        assert new_rounds(programme, budget)._cooled(HOT, 1e6) == []
        assert budget.left == left


@pytest.mark.parametrize("size", [4, 13])
@pytest.mark.parametrize("seed", range(3))
def test_what_cools_down_ends_with_every_layer_at_its_best(size: int, seed: int) -> None:
    programme = programme_of([size, size], seed=seed)
    boiling = SimpleNamespace(at=lambda _: 1e6)  # random up to the descent
    for layout in new_rounds(programme, Budget(1e9, 600))._cooled(boiling, 1e7):  # type: ignore[arg-type]
        for layer, device_E in enumerate(layout):
            worth_ED, expert_E = programme.worth(layout, layer), np.arange(2 * size)
            best_E = assign_places(-worth_ED, programme.places)
            assert worth_ED[expert_E, device_E].sum() == worth_ED[expert_E, best_E].sum()


TWO_LEVELS = np.kron(np.eye(2), np.full((2, 2), 4.0)) + 3 * np.eye(4)  # 7 on a device, 4 on a node
SHARES = np.linspace(0, 1, 11)


def pairs_of(*weights: list[list[float]], near: float = 1.0) -> Programme:
    size = len(weights[0]) if weights else 2
    sizes = (size,) * (len(weights) + 1)
    return Programme([np.array(one) for one in weights], sizes, np.array([1, 1]), near * np.eye(2), 2)


def cooled_down(cooling: Cooling) -> list[float]:
    return [cooling.at(share) for share in SHARES]


def share_decided(temperature: float, units: np.ndarray, hot: float) -> float:
    """The formula, unit by unit."""
    total = 0.0
    for unit in units:
        total += unit * min(1.0, max(0.0, np.log(hot * unit / temperature) / np.log(hot / COLD)))
    return total / float(units.sum())


@pytest.mark.parametrize("size", [1, 4, 10, 32])
def test_of_more_than_four_experts_a_device_either_end_is_hotter(size: int) -> None:
    weights, slots = [np.ones((2 * size, 2 * size))] * 2, np.array([size, 0, size + 3])
    cooling = Cooling(Programme(weights, (2 * size,) * 3, slots, np.eye(3), 3), Terms(), 1.25)
    more = max(size / 4, 1.0)
    expected = [1.25 * more**HOTTER, COLD * more**COLDER]
    assert [cooling.at(share) for share in (0, 1)] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("hot", [0.65, 1.25])
def test_of_weights_alike_the_temperature_falls_geometrically_from_hot_to_cold(hot: float) -> None:
    cooling = Cooling(pairs_of([[3.0, 3.0], [3.0, 3.0]], near=2.0), Terms(), hot)
    assert cooled_down(cooling) == pytest.approx([6 * hot * (COLD / hot) ** share for share in SHARES], rel=5e-3)


@settings(max_examples=20)
@given(st.integers(0, 99), st.sampled_from([0.2, 1.0, 3.0]))
def test_the_share_of_time_above_a_temperature_is_that_of_the_units_decided_there(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.lognormal(0, spread, (8, 8)) * rng.lognormal(0, spread, (8, 1))
    units = np.sqrt(np.concatenate([(weight**2).mean(axis=0), (weight**2).mean(axis=1)]))
    cooling = Cooling(Programme([weight], (8, 8), np.array([4, 4]), np.eye(2), 2), Terms(), 1.25)
    found = cooled_down(cooling)
    assert found == sorted(found, reverse=True)
    for share, temperature in zip(SHARES, found, strict=True):
        assert share_decided(temperature, units, 1.25) == pytest.approx(share, abs=0.03)


def test_a_unit_is_worth_what_a_device_is_more_than_its_node_and_pairs_of_a_layer_have_one_too() -> None:
    programme = Programme([np.full((2, 2), 5.0)], (2, 2), np.array([1, 1, 0, 0]), TWO_LEVELS, 2)
    assert Cooling(programme, Terms(), 1.0).at(0) == pytest.approx(3 * 5.0, rel=5e-3)
    beside = np.array([[[0.0, 2.0], [2.0, 0.0]]] * 2)  # 2 ** 0.5 each
    assert Cooling(programme, Terms(beside=beside), 1.0).at(1) == pytest.approx(3 * 2**0.5 * COLD, rel=5e-3)


@pytest.mark.parametrize("seed", range(5))
def test_units_alike_but_for_rounding_are_alike(seed: int) -> None:
    one = np.eye(16)[np.random.default_rng(seed).permutation(16)]
    weight = 0.6 * one + 0.3 * np.roll(one, 1, axis=1) + 0.1 / 16
    cooling = Cooling(Programme([weight], (16, 16), np.full(4, 4), np.eye(4), 4), Terms(), 1.0)
    assert cooling.at(0) == pytest.approx(np.sqrt((weight**2).mean()), rel=5e-3)
    assert cooling.at(1) == pytest.approx(cooling.at(0) * COLD, rel=5e-3)


def test_experts_without_weight_set_no_temperature() -> None:
    idle = pairs_of([[3.0, 0.0], [0.0, 0.0]])
    assert Cooling(idle, Terms(), 1.0).at(1) == pytest.approx(4.5**0.5 * COLD, rel=5e-3)
    for nothing in (pairs_of(), pairs_of([[0.0, 0.0], [0.0, 0.0]])):
        assert Cooling(nothing, Terms(), 1.0).at(0) == pytest.approx(1.0, rel=5e-3)
