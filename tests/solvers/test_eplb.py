import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import ReplicaRule

Array = NDArray[Any]


def literal_eplb(load: Array, num_slots: int, num_devices: int) -> tuple[list[list[int]], list[float]]:
    """One layer as DeepSeek's description reads: a list of experts a device, duplicates and all."""
    replicas, count = list(range(len(load))), [1] * len(load)
    while len(replicas) < num_slots:
        busiest = max(range(len(load)), key=lambda e: load[e] / count[e])
        replicas.append(busiest)
        count[busiest] += 1
    packs: list[list[int]] = [[] for _ in range(num_devices)]
    weights = [0.0] * num_devices
    for e in sorted(replicas, key=lambda e: -load[e] / count[e]):
        room = [d for d in range(num_devices) if len(packs[d]) < num_slots // num_devices]
        lightest = min(room, key=lambda d: weights[d])
        packs[lightest].append(e)
        weights[lightest] += load[e] / count[e]
    return packs, weights


@pytest.mark.parametrize(("num_experts", "num_devices", "slots"), [(8, 4, 2), (8, 4, 3), (32, 8, 5), (6, 6, 1)])
def test_where_the_published_algorithm_is_legal_the_placement_is_its(
    num_experts: int, num_devices: int, slots: int, rng: np.random.Generator
) -> None:
    legal = 0
    for _ in range(40):
        load = rng.lognormal(0, 0.7, num_experts)
        packs, weights = literal_eplb(load, num_devices * slots, num_devices)
        found = eplb.solve(load[None], Cluster(1, num_devices), slots=slots)
        if all(len(set(pack)) == slots for pack in packs):
            legal += 1
            row = found.placement.physical_to_logical[0].reshape(num_devices, slots)
            assert row.tolist() == [sorted(pack) for pack in packs]
            assert found.repaired == 0
            assert found.outcome.objective.value == pytest.approx(max(weights) / np.mean(weights))
        else:
            assert found.repaired > 0
    assert legal >= 5


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_loads_and_slots_give_a_legal_placement_within_its_bound(data: st.DataObject) -> None:
    num_experts, num_devices = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    slots = data.draw(st.lists(st.integers(0, num_experts), min_size=num_devices, max_size=num_devices))
    if sum(slots) < num_experts:
        slots[0] = num_experts
    loads = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 20), min_size=num_experts, max_size=num_experts), min_size=1, max_size=3)
        )
    )
    found = eplb.solve(loads, Cluster(1, num_devices), slots=slots)
    assert found.placement.slots.tolist() == slots
    assert found.placement.replica_rule is ReplicaRule.EVEN
    balances = []
    for layer, load in enumerate(loads):
        held = found.placement.holds(layer)[:, np.array(slots) > 0]
        device = (load[:, None] * held / held.sum(axis=1, keepdims=True)).sum(axis=0)
        balances.append(device.max() / device.mean() if device.sum() else 1.0)
    assert found.outcome.objective.value == pytest.approx(np.mean(balances))
    assert found.outcome.bound is not None
    assert 1 - 1e-12 <= found.outcome.bound <= found.outcome.objective.value + 1e-12


def test_an_expert_that_outweighs_all_gets_no_more_replicas_than_devices_and_that_is_counted() -> None:
    found = eplb.solve([[1000.0, 1.0, 1.0]], Cluster(1, 2), slots=3)
    assert found.placement.physical_to_logical.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert found.repaired > 0
    assert found.outcome.status is Status.OPTIMAL
    assert found.outcome.gap == 0


def test_deepseek_size_takes_about_a_second_at_most() -> None:
    loads = np.random.default_rng(0).lognormal(0, 1, (58, 256))
    started = time.perf_counter()
    found = eplb.solve(loads, Cluster(4, 8), slots=9)
    assert time.perf_counter() - started < 1.5
    assert found.outcome.objective.value < 1.02


@pytest.mark.parametrize("loads", [[1.0, 2.0], [[]], [[-1.0]], [[np.nan]], [[np.inf]], [["a"]], [[1e308, 1e308]]])
def test_loads_that_are_none_are_refused(loads: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        eplb.solve(loads, Cluster(1, 1))


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="4 slots on 2 devices for 5 experts"):
        eplb.solve(np.ones((1, 5)), Cluster(1, 2), slots=2)
