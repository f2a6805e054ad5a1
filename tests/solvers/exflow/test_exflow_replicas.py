import numpy as np
import pytest

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.exflow.replicas import with_replicas
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import Placement

# Experts 0 and 1 live on device 0, experts 2 and 3 on device 1, one slot is free on each; expert 3 has the load.
WEIGHT = np.array([[9.0, 0, 8, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
LOADS = np.array([[1.0, 1, 1, 99], [1.0, 1, 1, 99]])
LAYOUT = [np.array([0, 0, 1, 1])] * 2


@pytest.fixture
def programme() -> Programme:
    return Programme([WEIGHT], (4, 4), np.array([3, 3]), np.eye(2), 2)


def kept(placement: Placement) -> float:
    return float(hops_kept(WEIGHT[None], placement, 2).device.sum())


def replicas_of(placement: Placement, layer: int) -> list[int]:
    return np.flatnonzero(placement.holds(layer).sum(axis=1) > 1).tolist()


def test_free_slots_hold_what_follows_where_that_keeps_more_than_the_highest_loads(programme: Programme) -> None:
    _, found = with_replicas(programme, LAYOUT, LOADS, kept, Budget(0, 60))
    assert kept(found) == WEIGHT.sum()
    assert [replicas_of(found, layer) for layer in (0, 1)] == [[0, 2], [0, 2]]


def test_free_slots_hold_the_highest_loads_where_that_is_worth_no_less(programme: Programme) -> None:
    _, found = with_replicas(programme, LAYOUT, LOADS, lambda _: 0.0, Budget(0, 60))
    assert all(3 in replicas_of(found, layer) for layer in (0, 1))


def test_out_of_time_free_slots_hold_what_follows(programme: Programme) -> None:
    _, found = with_replicas(programme, LAYOUT, LOADS, lambda _: 0.0, Budget(0, 0))
    assert kept(found) == WEIGHT.sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spare", [1, 3, 8])
def test_devices_to_spare_keep_no_less_than_one_expert_on_each_without_them(seed: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.poisson(rng.dirichlet(np.full(8, 0.1), (5, 8)) * 30) * rng.integers(2, size=(5, 8, 1))
    exact = exflow.solve(weights, Cluster(1, 8)).outcome
    found = exflow.solve(weights, Cluster(1, 8 + spare), work=1.0, time_limit_s=60).outcome
    assert exact.status is Status.OPTIMAL
    assert found.objective.value >= exact.objective.value * (1 - 1e-12)
    assert found.status is Status.FEASIBLE
    assert found.bound is not None
    assert found.bound >= found.objective.value


def test_devices_that_hold_nothing_get_different_experts() -> None:
    wide = Programme([np.eye(4)], (4, 4), np.ones(7, np.int64), np.eye(7), 7)
    _, found = with_replicas(wide, [np.arange(4)] * 2, LOADS, lambda _: 0.0, Budget(0, 0))
    assert sorted(found.physical_to_logical[0].tolist()) == [0, 0, 1, 1, 2, 2, 3]
    assert (found.physical_to_logical[0] == found.physical_to_logical[1]).all()
