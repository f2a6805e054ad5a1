"""Placements for steps that are split exactly over replicas: their value, what they keep, and what they reach."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.placement import Placement, ReplicaRule
from tests.oracles.splits import split_ratios
from tests.solvers.builders import Array

EXACT = (ReplicaRule.QUOTA, ReplicaRule.LP)


def ratios(loads: Array, placement: Placement) -> Array:
    return split_ratios(np.stack([placement.holds(layer) for layer in range(placement.num_layers)]), loads)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    method=st.sampled_from(["published", "refined", "robust"]),
    slots=st.sampled_from([[3, 3, 3, 3], [4, 2, 3, 5], [4, 0, 4, 4]]),
    rule=st.sampled_from(EXACT),
)
def test_the_value_is_that_of_linear_programmes_and_no_worse_than_published(
    seed: int, method: Any, slots: list[int], rule: ReplicaRule
) -> None:
    rng = np.random.default_rng(seed)
    loads = rng.poisson(rng.lognormal(3, 1, (2, 8)), (5, 2, 8))
    dead, pins = [d for d, width in enumerate(slots) if not width], [(7, 0), (2, 3)]
    asked: dict[str, Any] = {"slots": [max(one, 1) for one in slots] if dead else slots, "dead": dead, "pins": pins}
    found, published = (
        eplb.solve(loads, Cluster(2, 2), method=one, replica_rule=rule, **asked) for one in (method, "published")
    )
    placement = found.placement
    assert placement.replica_rule is rule
    assert [placement.slots[d] for d in dead] == [0] * len(dead)
    assert all(expert in placement.held(layer, device) for layer in range(2) for expert, device in pins)
    value = found.outcome.objective.value
    assert value == pytest.approx(ratios(loads, placement).mean(), rel=1e-9)
    if method == "refined":
        assert (ratios(loads, placement).mean(axis=0) <= ratios(loads, published.placement).mean(axis=0) + 1e-9).all()
    assert found.outcome.bound == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_one_slot_more_than_experts_per_device_is_enough_for_one_step(seed: int) -> None:
    """Which E / D + 1 slots are, for any loads."""
    loads = np.random.default_rng(seed).zipf(1.5, (1, 1, 16)).clip(max=5000) * 100
    found = eplb.solve(loads, Cluster(1, 8), slots=3, replica_rule=ReplicaRule.LP)
    assert found.outcome.objective.value == pytest.approx(1.0, abs=2e-3)
    assert eplb.solve(loads, Cluster(1, 8), slots=3).outcome.objective.value > 1.005


def test_experts_of_a_group_stay_on_their_node() -> None:
    loads = np.random.default_rng(0).poisson(40, (6, 2, 16)) * np.arange(1, 17)
    found = eplb.solve(loads, Cluster(2, 4), slots=3, num_groups=4, replica_rule=ReplicaRule.LP)
    for row in found.placement.physical_to_logical.reshape(-1, 2, 12):
        first, second = (set((node // 4).tolist()) for node in row)
        assert not first & second


def test_without_replicas_the_rule_changes_nothing() -> None:
    loads = np.random.default_rng(0).poisson(40, (6, 2, 8))
    even, exact = (eplb.solve(loads, Cluster(1, 4), replica_rule=rule) for rule in (ReplicaRule.EVEN, ReplicaRule.LP))
    np.testing.assert_array_equal(even.placement.physical_to_logical, exact.placement.physical_to_logical)
    assert even.outcome.objective == exact.outcome.objective
    assert even.outcome.bound == exact.outcome.bound


def test_the_same_steps_give_the_same_placement() -> None:
    loads = np.random.default_rng(0).poisson(40, (6, 1, 8)) * np.arange(1, 9)
    one, other = (eplb.solve(loads, Cluster(1, 4), slots=3, replica_rule=ReplicaRule.LP) for _ in range(2))
    np.testing.assert_array_equal(one.placement.physical_to_logical, other.placement.physical_to_logical)


def test_a_quantile_is_refused() -> None:
    with pytest.raises(UsageError, match="a quantile of steps with the replica rule lp"):
        eplb.solve(np.ones((2, 1, 4)), Cluster(1, 2), slots=3, quantile=0.9, replica_rule=ReplicaRule.LP)
