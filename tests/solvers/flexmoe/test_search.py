import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.flexmoe.search import AIMS, Search, price, searched, seconds_of
from moeplan.solvers.flexmoe.state import holds
from tests.solvers.flexmoe.layers import COSTS, Array, holders, layers, naive_over_steps
from tests.solvers.flexmoe.test_cuts import is_legal

Layer = tuple[Array, Array, int]


def task_of(
    table: Array, pairs: Array, group: int, *, free: bool = False, horizon: float = 100.0, quantile: float = 0.0
) -> Search:
    num_experts, costs = pairs.shape[1], COSTS._replace(replicas_free=free)
    home = np.array([holders(table, e)[0] for e in range(num_experts)])
    return Search.of(pairs, 1, holds(table, num_experts), home, group, costs, horizon, quantile)


def value(table: Array, task: Search) -> float:
    held = holds(table, task.totals.shape[1])
    return float(seconds_of(table, held, task, np.inf, np.zeros(AIMS, np.int64), np.zeros(len(task.pairs))))


@given(layers(vectors=5), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
def test_the_value_is_the_mean_of_all_vectors_or_a_quantile_of_them(layer: Layer, quantile: float) -> None:
    table, pairs, group = layer
    each = [value(table, task_of(table, one[None], group)) for one in pairs]
    found = value(table, task_of(table, pairs, group, quantile=quantile))
    assert found == pytest.approx(naive_over_steps(each, quantile))


def test_the_worst_vector_is_served_better_where_it_counts_alone() -> None:
    calm, burst = (np.random.default_rng(seed).integers(0, 300, (6, 3)) for seed in (0, 1))
    burst[4:] *= 20
    pairs, table = np.stack([calm] * 4 + [burst]), np.array([[0, 1, -1], [2, 3, -1], [4, 5, -1]])
    worst = []
    for quantile in (0.0, 1.0):
        task = task_of(table, pairs, 1, free=True, horizon=1e12, quantile=quantile)
        found, _ = searched(table, task, 3000, np.array([1], np.uint64))
        worst.append(value(found, task_of(table, pairs, 1, free=True, horizon=1e12, quantile=1.0)))
    assert worst[1] < worst[0]


@settings(max_examples=60)
@given(layers(vectors=4), st.booleans(), st.integers(1, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_best_table_is_legal_worth_what_it_says_and_no_worse(
    layer: Layer, free: bool, seed: int, quantile: float
) -> None:
    table, pairs, group = layer
    task = task_of(table, pairs, group, free=free, quantile=quantile)
    found, found_value = searched(table, task, 40, np.array([seed], np.uint64))
    is_legal(found, pairs.shape[1])
    assert found_value == pytest.approx(value(found, task))
    assert found_value <= value(table, task) + 1e-15
    again, _ = searched(table, task, 40, np.array([seed], np.uint64))
    assert found.tolist() == again.tolist()


@given(layers(), st.booleans())
def test_the_price_is_of_new_cells_or_of_homes_lost(layer: Layer, free: bool) -> None:
    table, pairs, group = layer
    task, after = task_of(table, pairs, group, free=free), np.roll(table, 1, axis=0)
    ports = np.zeros((2, len(table)))
    for e in range(pairs.shape[1]):
        new = [task.home[e]] if free else holders(after, e)
        for d in new:
            at = holders(after if free else table, e)
            if d not in at:
                near = any(h // group == d // group for h in at)
                ports[int(not near), d] += 1
    busiest = 0.4 * ports.max(axis=1) + 0.6 * np.sqrt((ports**2).mean(axis=1))
    row_s = max(busiest * [COSTS.intra_sum_s_per_byte, COSTS.inter_sum_s_per_byte])
    assert price(holds(after, pairs.shape[1]), task) == pytest.approx(COSTS.moved_bytes * row_s / 100)


def test_a_small_layer_is_placed_as_well_as_the_best_of_all_tables() -> None:
    sets = [row for n in (0, 1, 2) for row in itertools.combinations(range(3), n)]
    reached = []
    for seed in range(20):
        pairs = np.random.default_rng(seed).integers(0, 3000, (1, 3, 3))
        start = np.array([[0, -1], [1, -1], [2, -1]])
        task = task_of(start, pairs, 1, horizon=1e12)
        tables = [
            np.array([[*row, -1, -1][:2] for row in rows])
            for rows in itertools.product(sets, repeat=3)
            if {*itertools.chain(*rows)} == {0, 1, 2}
        ]
        best = min(value(table, task) for table in tables)
        _, found = searched(start, task, 4000, np.array([seed + 1], np.uint64))
        assert found >= best - 1e-15
        reached.append(found / best)
    assert np.median(reached) == pytest.approx(1)
    assert max(reached) < 1.03
