from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import optimal_degree, unequal_chunks

Simulated = Callable[[Sequence[float], Sequence[float], Sequence[float], bool], float]
starts = st.floats(-4, -1.5).map(lambda x: 10**x)
works = st.floats(-1, 0.5).map(lambda x: 10**x)


def seconds(simulated: Simulated, layer: dict[str, Any], shares: Sequence[float], full_duplex: bool) -> float:
    share = np.array(shares)
    t_d, t_e = layer["a_a"] + layer["b_a"] * share, layer["a_e"] + layer["b_e"] * share
    return simulated(t_d.tolist(), t_e.tolist(), t_d.tolist(), full_duplex)


@settings(max_examples=25, deadline=None)
@given(starts, starts, works, works, st.booleans(), st.integers(0, 99))
def test_unequal_chunks_take_what_the_simulation_says_and_no_others_are_faster(
    simulated: Simulated, a_a: float, a_e: float, d: float, e: float, full_duplex: bool, seed: int
) -> None:
    layer: dict[str, Any] = {"a_a": a_a, "b_a": d, "a_e": a_e, "b_e": e}
    found = unequal_chunks(**layer, n_d=1, n_e=1, max_degree=6, full_duplex=full_duplex)
    value = found.outcome.objective.value
    equal = optimal_degree(**layer, n_d=1, n_e=1, backward=0, max_degree=6, full_duplex=full_duplex)
    assert sum(found.shares) == pytest.approx(1)
    assert seconds(simulated, layer, found.shares, full_duplex) == pytest.approx(value, rel=1e-6)
    assert value <= found.equal_s == equal.forward_s
    assert found.outcome.status is Status.OPTIMAL
    rng = np.random.default_rng(seed)
    for r in rng.integers(1, 7, 20).tolist():
        others = [rng.dirichlet(np.ones(r)), np.abs(rng.normal(np.resize(found.shares, r), 0.02))]
        for shares in others:
            assert seconds(simulated, layer, (shares / shares.sum()).tolist(), full_duplex) >= value * (1 - 1e-7)


def test_they_help_where_the_experts_saturate_and_not_where_the_network_does() -> None:
    layer: dict[str, Any] = {"a_a": 0.02, "b_a": 1.0, "a_e": 0.02}
    slow_experts = unequal_chunks(**layer, b_e=2.5, n_d=1, n_e=1)
    assert slow_experts.outcome.objective.value < 0.95 * slow_experts.equal_s
    assert slow_experts.shares[0] == min(slow_experts.shares[:3])
    slow_network = unequal_chunks(**layer, b_e=0.5, n_d=1, n_e=1)
    assert slow_network.outcome.objective.value == slow_network.equal_s
    assert slow_network.shares == (0.5, 0.5)


def test_optimal_only_where_no_further_chunk_could_help() -> None:
    layer: dict[str, Any] = {"a_a": 1e-6, "b_a": 1.0, "b_e": 2.5, "n_d": 1, "n_e": 1}
    free, slow = unequal_chunks(**layer, a_e=1e-6).outcome, unequal_chunks(**layer, a_e=0.05).outcome
    assert free.status is Status.FEASIBLE
    assert free.bound == pytest.approx(2e-6 + 17e-6 + 2.5)
    assert free.bound is not None
    assert free.bound < free.objective.value
    assert slow.status is Status.OPTIMAL
    assert unequal_chunks(**layer, a_e=1e-6, max_degree=4).outcome.status is Status.OPTIMAL


def test_two_chunks_are_best_equal() -> None:
    found = unequal_chunks(a_a=0.02, b_a=1.0, a_e=0.02, b_e=2.5, n_d=1, n_e=1, max_degree=2)
    assert found.shares == (0.5, 0.5)
