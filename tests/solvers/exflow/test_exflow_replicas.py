import numpy as np
import pytest

from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.exflow.replicas import with_replicas
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
