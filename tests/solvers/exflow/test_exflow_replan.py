import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, exflow
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow import kernel, replan
from moeplan.solvers.exflow.budget import Budget, Cooling
from moeplan.solvers.exflow.problem import Goal
from moeplan.solvers.exflow.programme import Programme, Terms
from moeplan.solvers.exflow.replan import ALIKE, LITTLE, reconsider
from moeplan.solvers.exflow.state import State, state_of
from moeplan.solvers.moves import experts_moved, keep_in_place
from moeplan.solvers.outcome import PlacementResult, Status
from moeplan.solvers.placement import Placement
from tests.builders import known
from tests.solvers.builders import Array

LITTLE_WORK = 1e7


def value(weights: Array, cluster: Cluster, placement: Placement) -> float:
    goal = Goal(cluster, float(weights.sum()), expected=False)
    return goal.value(hops_kept(weights, placement, cluster.devices_per_node))


def same(one: Placement, other: Placement) -> bool:
    return np.array_equal(one.physical_to_logical, other.physical_to_logical)


def best_net(weights: Array, cluster: Cluster, old: Placement, price: float) -> float:
    """The most value less the price of moves, over all placements of 4 experts on 2 devices in 3 layers."""
    deals = [[list(one), [e for e in range(4) if e not in one]] for one in itertools.combinations(range(4), 2)]
    placements = (Placement.from_sets(list(layers), 4) for layers in itertools.product(deals, repeat=3))
    return max(value(weights, cluster, one) - price * int(experts_moved(one, old).sum()) for one in placements)


@pytest.mark.parametrize("price", [0.0, 3.0, 20.0, 1e6])
def test_what_it_goes_to_is_worth_the_best_and_no_less_than_staying_or_going(price: float, rng: Generator) -> None:
    cluster = Cluster(1, 2)
    for _ in range(5):
        weights = rng.poisson(rng.dirichlet(np.full(4, 0.4), (2, 4)) * 50).astype(float)
        found = exflow.solve(weights, cluster, work=LITTLE_WORK)
        old = exflow.solve(rng.permuted(weights, axis=2), cluster, work=LITTLE_WORK).placement
        went = reconsider(weights, cluster, found, old, price=price)
        least = max(price, ALIKE * value(weights, cluster, found.placement) / 12)
        nets = [
            value(weights, cluster, one) - least * experts_moved(one, old).sum()
            for one in (went.placement, old, found.placement)
        ]
        little = LITTLE * value(weights, cluster, old)
        assert nets[0] >= max(nets[1:]) - little
        assert nets[0] == pytest.approx(best_net(weights, cluster, old, least), abs=little)
        assert went.outcome.objective.value == pytest.approx(value(weights, cluster, went.placement) / weights.sum())


def drifted(cluster: Cluster, rng: Generator) -> tuple[Array, PlacementResult, Placement]:
    """Transitions of traffic that has changed by a tenth since a placement was found, and one found for them now."""
    then, new = rng.dirichlet(np.full(16, 1.0), (2, 5, 16))
    weights = rng.poisson((0.9 * then + 0.1 * new) * 200).astype(float)
    old = exflow.solve(rng.poisson(then * 200), cluster, work=LITTLE_WORK).placement
    return weights, exflow.solve(weights, cluster, work=LITTLE_WORK, seed=1), old


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=str)
def test_a_small_price_leaves_almost_all_value_for_far_fewer_moves(shape: tuple[int, int], rng: Generator) -> None:
    cluster, moved, named = Cluster(*shape), [0, 0], 0
    for _ in range(12):
        weights, found, old = drifted(cluster, rng)
        whole = value(weights, cluster, found.placement)
        for place, share in enumerate((0.0, 4 * ALIKE)):
            went = reconsider(weights, cluster, found, old, price=share * whole / 96)
            assert value(weights, cluster, went.placement) >= (0.99, 0.97)[place] * whole
            moved[place] += int(experts_moved(went.placement, old).sum())
        named += int(experts_moved(keep_in_place(found.placement, old, cluster.devices_per_node), old).sum())
        assert same(reconsider(weights, cluster, found, old, price=share * whole / 96).placement, went.placement)
    assert moved[1] < 0.85 * min(moved[0], named)


def test_on_the_same_traffic_nothing_moves_whatever_a_search_from_nothing_finds(rng: Generator) -> None:
    cluster = Cluster(1, 4)
    weights = rng.poisson(rng.dirichlet(np.full(16, 1.0), (5, 16)) * 200).astype(float)
    old = exflow.solve(weights, cluster, work=10 * LITTLE_WORK).placement
    for seed in (1, 2):
        found = exflow.solve(weights, cluster, work=LITTLE_WORK, seed=seed)
        assert experts_moved(found.placement, old).sum() > 0
        assert same(reconsider(weights, cluster, found, old).placement, old)


@pytest.mark.parametrize("price", [0.0, 30.0, 1e6])
def test_pairs_inside_layers_are_weighed_within_a_cap_that_old_homes_may_break(price: float, rng: Generator) -> None:
    cluster, nothing = Cluster(1, 2), np.zeros((1, 8, 8))
    pairs = rng.integers(0, 50, (2, 8, 8)).astype(float)
    pairs += pairs.transpose(0, 2, 1)
    loads = pairs.sum(axis=2)
    wanted: dict[str, Any] = {"coactivation": pairs, "loads": loads, "max_load": 1.1}
    found = exflow.solve(nothing, cluster, work=LITTLE_WORK, **wanted)
    heavy_first = np.argsort(-loads, axis=1)
    uneven = Placement.from_sets([[sorted(row[:4]), sorted(row[4:])] for row in heavy_first.tolist()], 8)
    for old, may_stay in ((uneven, False), (found.placement, True)):
        went = reconsider(nothing, cluster, found, old, price=price, **wanted).placement
        for layer in range(2):
            held_D = went.holds(layer).T @ loads[layer]
            assert held_D.max() <= 1.1 * held_D.mean() * (1 + 1e-9)
        assert same(went, old) == may_stay
    moved = [
        experts_moved(reconsider(nothing, cluster, found, uneven, price=one, **wanted).placement, uneven).sum()
        for one in (0.0, 1e6)
    ]
    assert moved[0] >= moved[1] > 0


@pytest.mark.parametrize("unit", [1e-200, 1e-100, 1e200])
def test_a_price_is_in_the_unit_of_the_weights(unit: float, rng: Generator) -> None:
    cluster, scale = Cluster(1, 4), 2.0 ** round(np.log2(unit))
    weights, _, old = drifted(cluster, rng)
    for price in (0.01, 0.3, 1e6):
        price *= weights.sum() / old.num_layers / old.num_experts
        went = []
        for by in (1.0, scale):
            found = exflow.solve(weights * by, cluster, work=LITTLE_WORK)
            went.append(reconsider(weights * by, cluster, found, old, price=price * by).placement)
        assert same(*went)


@pytest.mark.parametrize("price", [1e300, np.inf])
def test_at_a_price_beyond_all_that_could_be_gained_nothing_moves(price: float, rng: Generator) -> None:
    for cluster in (Cluster(1, 4), Cluster(2, 2)):
        weights, found, old = drifted(cluster, rng)
        assert same(reconsider(weights, cluster, found, old, price=price).placement, old)
    for wrong in (-1.0, np.nan):
        with pytest.raises(ValueError, match="expected 0 or more"):
            reconsider(weights, cluster, found, old, price=wrong)


def test_a_search_that_was_interrupted_is_not_followed_by_another(rng: Generator) -> None:
    cluster = Cluster(1, 4)
    weights, found, old = drifted(cluster, rng)
    stopped = dataclasses.replace(found, outcome=dataclasses.replace(found.outcome, status=Status.INTERRUPTED))
    went = reconsider(weights, cluster, stopped, old)
    assert went.outcome.status is Status.INTERRUPTED
    assert same(went.placement, old) or same(went.placement, keep_in_place(found.placement, old, 4))


def test_work_ends_it_the_same_way_again_and_time_only_with_a_word(rng: Generator) -> None:
    cluster = Cluster(2, 2)
    weights, found, old = drifted(cluster, rng)
    first, again = (reconsider(weights, cluster, found, old, work=2e6, time_limit_s=1e3) for _ in range(2))
    assert same(first.placement, again.placement)
    assert first.outcome.status is found.outcome.status is Status.FEASIBLE
    late = reconsider(weights, cluster, found, old, work=1e12, time_limit_s=1e-9)
    assert late.outcome.status is Status.TIME_LIMIT


def test_on_a_single_device_nothing_moves_whatever_time_there_is(rng: Generator) -> None:
    cluster = Cluster(1, 1)
    weights, found, old = drifted(cluster, rng)
    went = reconsider(weights, cluster, found, old, price=1.0)
    assert same(went.placement, old)
    assert went.outcome.objective.value == 1


@pytest.mark.parametrize("blocks", [100, 125, 149, 151])
def test_a_reheating_cools_down_in_chunks_that_meet_and_make_all_its_moves(blocks: int) -> None:
    cooling = Cooling(Programme([np.full((4, 4), 2.0)], (4, 4), np.array([2, 2]), np.eye(2), 2), Terms(), 0.8)
    chunks = [*replan._chunks(cooling, blocks)]
    assert sum(moves for moves, *_ in chunks) == blocks
    assert all(0 < moves <= replan.CHUNK for moves, *_ in chunks)
    assert (chunks[0][1], chunks[-1][2]) == pytest.approx((1.6, 1.0), rel=0.01)
    for (_, _, end), (_, begin, _) in itertools.pairwise(chunks):
        assert end == begin


def test_old_homes_pull_by_the_price_and_tie_devices_to_names(rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[State] = []

    def noted(state: State, *_: object) -> int:
        seen.append(state)
        return 0

    monkeypatch.setattr(kernel, "anneal", noted)
    monkeypatch.setattr(kernel, "descend", lambda *_: None)
    programme = Programme([rng.random((4, 4))], (4, 4), np.array([2, 2]), np.eye(2), 2)
    before, now = [np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])], [np.array([1, 0, 0, 1]), np.array([0, 0, 1, 1])]
    weighed = replan._Weighed(programme, Terms(), before, 0.25, Cooling(programme, Terms(), 0.8))
    weighed.reheated(now, 100, Budget(1e9, 600), np.array([1], np.uint64))
    more = (seen[0].pull - state_of(programme, Terms(), now).pull) * seen[0].worth[0]
    assert more == pytest.approx(0.25 * np.stack([np.eye(2)[:, home_E] for home_E in before]), rel=1e-6)
    assert all(state.tied for state in seen)


def test_an_optimum_that_is_not_taken_is_no_longer_called_one(rng: Generator) -> None:
    cluster = Cluster(1, 4)
    weights = rng.poisson(rng.dirichlet(np.full(4, 0.2), (2, 4)) * 200).astype(float)
    found, old = exflow.solve(weights, cluster), contiguous.solve(3, 4, cluster).placement
    assert found.outcome.status is Status.OPTIMAL
    went = reconsider(weights, cluster, found, old, price=1e9).outcome
    assert went.status is Status.FEASIBLE
    assert went.bound == found.outcome.bound
    assert known(went.gap) > 0


def test_moves_have_no_price_where_experts_have_replicas() -> None:
    cluster, weights = Cluster(1, 2), np.ones((1, 4, 4))
    old = contiguous.solve(2, 4, cluster).placement
    replicated = exflow.solve(weights, cluster, slots=3)
    assert reconsider(weights, cluster, replicated, old).placement.has_replicas
    with pytest.raises(UsageError, match="6 then"):
        reconsider(weights, cluster, replicated, old, price=1.0)
