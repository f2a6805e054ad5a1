import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.solvers.flexmoe.paper import _part, _slowest, scheduled
from tests.solvers.flexmoe.layers import COSTS, Array, layers
from tests.solvers.flexmoe.test_cuts import is_legal

Layer = tuple[Array, Array, int]


def slowest(table: Array, pairs: Array, group: int) -> float:
    parts = np.zeros((len(pairs), 5, len(table)))
    for e in range(len(pairs)):
        _part(parts[e], table, e, pairs, group, COSTS)
    return float(_slowest(parts.sum(axis=0)))


@given(layers(), st.booleans(), st.sampled_from([1.0, 1.2, 9.0]))
def test_the_scheduler_lowers_equation_5_and_loses_no_expert(layer: Layer, every: bool, threshold: float) -> None:
    table, batches, group = layer
    pairs = batches[0]
    found = scheduled(table, pairs, group, COSTS, threshold, every)
    is_legal(found, len(pairs))
    assert slowest(found, pairs, group) <= slowest(table, pairs, group) * (1 + 1e-12)


def test_it_expands_the_heaviest_and_shrinks_the_lightest() -> None:
    table = np.array([[0, 1], [1, 2]])
    pairs = np.array([[90, 10], [4, 6], [5, 5]]) * 1000
    found = scheduled(table, pairs, 2, COSTS, 1.2, False)
    assert sorted(sorted(row) for row in found.tolist()) == [[0, 1], [0, 2]]


def test_expert_seconds_follow_even_capacities() -> None:
    part = np.zeros((5, 2))
    _part(part, np.array([[0], [0]]), 0, np.array([[30, 10]]), 2, COSTS)
    assert part[0] == pytest.approx(COSTS.pair_s * np.array([20, 20]))
    sums = COSTS.gradient_bytes * COSTS.intra_sum_s_per_byte
    assert part[1] - sums == pytest.approx([4 * COSTS.copy_bytes * 10 / 300e9, 0])
    assert part[2] - sums == pytest.approx([0, 4 * COSTS.copy_bytes * 10 / 300e9])
