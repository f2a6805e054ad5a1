import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, exflow
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow.goal import Goal
from moeplan.solvers.exflow.replan import reconsider
from moeplan.solvers.moves import experts_moved
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import Placement
from moeplan.solvers.result import PlacementResult

Array = NDArray[Any]


def value(weights: Array, cluster: Cluster, placement: Placement) -> float:
    goal = Goal(cluster, float(weights.sum()), expected=False)
    return goal.value(hops_kept(weights, placement, cluster.devices_per_node))


def best_net(weights: Array, cluster: Cluster, old: Placement, price: float) -> float:
    """The most value less the price of moves, over all placements of 4 experts on 2 devices in 3 layers."""
    deals = [[list(one), [e for e in range(4) if e not in one]] for one in itertools.combinations(range(4), 2)]
    placements = (Placement.from_sets(list(layers), 4) for layers in itertools.product(deals, repeat=3))
    return max(value(weights, cluster, one) - price * int(experts_moved(one, old).sum()) for one in placements)


@pytest.mark.parametrize("price", [0.0, 3.0, 20.0, 1e6])
def test_what_it_goes_to_is_worth_at_least_what_staying_and_what_going_all_the_way_are(
    price: float, rng: np.random.Generator
) -> None:
    cluster, optimal = Cluster(1, 2), 0
    for _ in range(5):
        weights = rng.poisson(rng.dirichlet(np.full(4, 0.4), (2, 4)) * 50).astype(float)
        found = exflow.solve(weights, cluster, time_limit_s=5)
        old = exflow.solve(rng.permuted(weights, axis=2), cluster, time_limit_s=5).placement
        went = reconsider(weights, cluster, found, old, price=price)
        nets = [
            value(weights, cluster, one) - price * experts_moved(one, old).sum()
            for one in (went.placement, old, found.placement)
        ]
        assert nets[0] >= max(nets[1:]) - 1e-9
        best = best_net(weights, cluster, old, price)
        assert nets[0] <= best + 1e-9
        optimal += nets[0] >= best - 1e-9
        assert went.outcome.objective.value == pytest.approx(value(weights, cluster, went.placement) / weights.sum())
    assert optimal >= 3


def test_the_dearer_moves_are_the_fewer_there_are_and_at_the_dearest_none(rng: np.random.Generator) -> None:
    cluster = Cluster(2, 2)
    weights = rng.poisson(rng.dirichlet(np.full(16, 0.2), (5, 16)) * 200).astype(float)
    old = exflow.solve(rng.permuted(weights, axis=2), cluster, time_limit_s=5).placement
    found = exflow.solve(weights, cluster, time_limit_s=5)
    went = [reconsider(weights, cluster, found, old, price=price) for price in (0.0, 100.0, 1e9)]
    moved = [int(experts_moved(one.placement, old).sum()) for one in went]
    assert moved[0] >= moved[1] >= moved[2] == 0
    assert moved[0] > 0
    worth = [value(weights, cluster, one.placement) for one in went]
    assert worth[0] >= worth[1] >= worth[2]
    assert went[0].outcome == found.outcome


def test_an_optimum_that_is_not_taken_is_no_longer_called_one(rng: np.random.Generator) -> None:
    cluster = Cluster(1, 4)
    weights = rng.poisson(rng.dirichlet(np.full(4, 0.2), (2, 4)) * 200).astype(float)
    found, old = exflow.solve(weights, cluster), contiguous.solve(3, 4, cluster).placement
    assert found.outcome.status is Status.OPTIMAL
    went = reconsider(weights, cluster, found, old, price=1e9).outcome
    assert went.status is Status.FEASIBLE
    assert went.bound == found.outcome.bound
    assert went.gap is not None
    assert went.gap > 0


def test_moves_have_no_price_where_experts_have_replicas_or_hops_are_not_the_objective() -> None:
    cluster, weights = Cluster(1, 2), np.ones((1, 4, 4))
    old = contiguous.solve(2, 4, cluster).placement
    replicated = exflow.solve(weights, cluster, slots=3)
    assert reconsider(weights, cluster, replicated, old).placement.has_replicas
    with pytest.raises(UsageError, match="6 then"):
        reconsider(weights, cluster, replicated, old, price=1.0)
    found = exflow.solve(weights, cluster)
    objective = dataclasses.replace(found.outcome.objective, name="balance")
    other = PlacementResult(found.placement, dataclasses.replace(found.outcome, objective=objective))
    with pytest.raises(UsageError, match="against balance"):
        reconsider(weights, cluster, other, old, price=1.0)
