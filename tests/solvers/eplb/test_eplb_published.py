from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.solvers.outcome import Status
from tests.builders import known
from tests.solvers.builders import Array


def literal_eplb(load: Array, num_slots: int, num_devices: int) -> tuple[list[list[int]], list[float]]:
    """One layer as DeepSeek's description reads: a list of experts a device, duplicates and all."""
    replicas, count = list(range(len(load))), [1] * len(load)
    while len(replicas) < num_slots:
        busiest = max(range(len(load)), key=lambda e: load[e] / count[e])
        replicas.append(busiest)
        count[busiest] += 1
    return literal_packing(replicas, [load[e] / count[e] for e in replicas], num_devices)


def literal_packing(items: list[int], weight: list[float], num_packs: int) -> tuple[list[list[int]], list[float]]:
    """Items in packs of as many: as they stand where each takes one, else heaviest first to the lightest with room."""
    if len(items) == num_packs:
        return [[item] for item in items], weight
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    weights = [0.0] * num_packs
    for place in sorted(range(len(items)), key=lambda place: -weight[place]):
        room = [d for d in range(num_packs) if len(packs[d]) < len(items) // num_packs]
        lightest = min(room, key=lambda d: weights[d])
        packs[lightest].append(items[place])
        weights[lightest] += weight[place]
    return packs, weights


def literal_hierarchy(load: Array, num_groups: int, cluster: Cluster, slots: int) -> list[list[int]]:
    """One layer of the hierarchical form as described: groups to nodes, then each node by itself."""
    size, devices = len(load) // num_groups, cluster.devices_per_node
    heavy = [float(load[group * size : (group + 1) * size].sum()) for group in range(num_groups)]
    nodes, _ = literal_packing(list(range(num_groups)), heavy, cluster.num_nodes)
    packs = []
    for groups in nodes:
        members = [group * size + e for group in sorted(groups) for e in range(size)]
        inside, _ = literal_eplb(load[members], slots * devices, devices)
        packs += [[members[e] for e in pack] for pack in inside]
    return packs


@pytest.mark.parametrize(
    ("num_experts", "num_groups", "shape", "slots"),
    [(16, 4, "2x2", 4), (16, 4, "2x2", 5), (32, 8, "4x2", 5), (12, 6, "3x2", 3), (16, 2, "2x4", 3), (16, 4, "4x4", 1),
     (8, None, "1x4", 2), (8, None, "1x4", 3), (32, None, "1x8", 5), (6, None, "1x6", 1)],
)  # fmt: skip
def test_where_the_published_placement_is_legal_it_is_taken_and_no_group_is_split(
    num_experts: int, num_groups: int | None, shape: str, slots: int, rng: Generator
) -> None:
    cluster, legal = Cluster.parse(shape), 0
    for _ in range(30):
        load = rng.lognormal(0, 0.5, (2, num_experts))
        found = eplb.solve(load, cluster, slots=slots, num_groups=num_groups, method="published")
        assert found.outcome.backend == ("moeplan hierarchical" if num_groups else "moeplan")
        published = [literal_hierarchy(load_E, num_groups or 1, cluster, slots) for load_E in load]
        as_they_are = [all(len(set(pack)) == slots for pack in packs) for packs in published]
        for row, packs, taken in zip(found.placement.physical_to_logical, published, as_they_are, strict=True):
            size = num_experts // (num_groups or num_experts)
            nodes = [set((node // size).tolist()) for node in row.reshape(cluster.num_nodes, -1)]
            assert num_groups in (None, sum(map(len, nodes)))
            assert not taken or row.reshape(-1, slots).tolist() == [sorted(pack) for pack in packs]
        assert (found.repaired > 0) != all(as_they_are)
        assert known(found.outcome.bound) <= found.outcome.objective.value * (1 + 1e-12)
        legal += sum(as_they_are)
    assert legal >= 3


@pytest.mark.parametrize(
    ("num_groups", "shape", "slots"),
    [(None, "2x2", 4), (4, "1x4", 4), (3, "2x2", 4), (5, "2x2", 4), (4, "2x2", [6, 4, 4, 4]), (4, "2x2", 9)],
    ids=str,
)
def test_without_a_hierarchical_form_it_is_the_global_one(num_groups: int | None, shape: str, slots: Any) -> None:
    load, cluster = np.arange(32.0).reshape(2, 16), Cluster.parse(shape)
    found, expected = (
        eplb.solve(load, cluster, slots=slots, num_groups=groups, method="published") for groups in (num_groups, None)
    )
    assert found.outcome.backend == "moeplan"
    assert (found.placement.physical_to_logical == expected.placement.physical_to_logical).all()


def test_an_expert_that_outweighs_all_gets_no_more_replicas_than_devices_and_that_is_counted() -> None:
    found = eplb.solve([[1000.0, 1.0, 1.0]], Cluster(1, 2), slots=3, method="published")
    assert found.placement.physical_to_logical.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert found.repaired > 0
    assert found.outcome.status is Status.OPTIMAL
    assert found.outcome.gap == 0


def test_raw_is_the_published_algorithm_with_its_duplicates(rng: Generator) -> None:
    load = rng.lognormal(0, 1.5, (40, 8))
    layers = [literal_eplb(row, 12, 4) for row in load]
    ratios = [max(weights) / np.mean(weights) for _, weights in layers]
    duplicates = sum(len(pack) - len(set(pack)) for packs, _ in layers for pack in packs)
    found = eplb.raw_balance(load, Cluster(1, 4), slots=3)
    assert found.balance == pytest.approx(np.mean(ratios))
    assert found.duplicates == duplicates > 0


def test_raw_keeps_groups_on_nodes(rng: Generator) -> None:
    load, cluster = rng.lognormal(0, 0.5, (6, 32)), Cluster(4, 2)
    legal = eplb.solve(load, cluster, slots=5, num_groups=8, method="published")
    found = eplb.raw_balance(load, cluster, slots=5, num_groups=8)
    assert found.balance > eplb.raw_balance(load, cluster, slots=5).balance
    if not found.duplicates:
        assert found.balance == pytest.approx(legal.outcome.objective.value)


@pytest.mark.parametrize("loads", [[1.0, 2.0], [[]], [[-1.0]], [[np.nan]], [[np.inf]], [["a"]], [[1e308, 1e308]]])
def test_loads_that_are_none_are_refused(loads: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        eplb.solve(loads, Cluster(1, 1))


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="4 slots on 2 devices for 5 experts"):
        eplb.solve(np.ones((1, 5)), Cluster(1, 2), slots=2)


@pytest.mark.parametrize(
    ("slots", "pins", "num_experts"),
    [
        ([2, 3, 1], [(1, 1), (1, 2), (2, 0), (0, 0)], 3),  # a spare replica is where nothing can go
        ([3, 2, 0, 3], [(0, 0), (3, 1), (1, 1), (2, 0), (2, 3), (3, 3), (1, 0)], 4),
        ([2, 1, 4], [(0, 0), (4, 2), (3, 0), (3, 2), (4, 1)], 5),
    ],
)
def test_pins_leaving_nothing_are_kept(slots: list[int], pins: list[tuple[int, int]], num_experts: int) -> None:
    loads = np.random.default_rng(0).integers(0, 3, (160, num_experts))
    placement = eplb.solve(loads, Cluster(1, len(slots)), slots=slots, pins=pins, method="published").placement
    for layer in range(len(loads)):
        held = placement.holds(layer)
        assert held.sum() == sum(slots)
        assert all(held[pin] for pin in pins)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pins": [(8, 0)]}, "pin 8@0: expected EXPERT@DEVICE with experts 0 to 7 and devices 0 to 3"),
        ({"pins": [(0, 4)]}, "pin 0@4"),
        ({"pins": [(-1, 0)]}, "pin -1@0"),
        ({"pins": [(0, 2)], "dead": [2], "slots": 3}, "pin 0@2: device 2 has no slots"),
        ({"pins": [(e, 1) for e in range(3)]}, "3 experts pinned on device 1; expected at most its 2 slots"),
        ({"pins": [(0, 0), (0, 1)]}, "pins and experts need 9 slots of 8"),
        ({"dead": [4]}, "dead device 4 of 4 devices"),
        ({"dead": [0, 1, 2, 3]}, "all 4 devices are dead"),
        ({"dead": [1], "slots": 2}, "6 slots on 3 devices that are not dead for 8 experts; expected at least 3"),
        ({"dead": [1], "slots": [2, 8, 2, 2]}, "6 slots on 3 devices"),
        ({"groups": "whole"}, "without expert groups"),
        ({"groups": "whole", "num_groups": 3}, "8 experts in 3 groups"),
        ({"groups": "whole", "num_groups": 4, "slots": 3}, "12 slots, 3 to 3 a device"),
        ({"groups": "whole", "num_groups": 4, "dead": [0]}, "0 to 3 a device"),
        ({"groups": "whole", "num_groups": 4, "pins": [(0, 0), (1, 1)]}, "pins need an expert group in two places"),
        ({"groups": "whole", "num_groups": 2, "pins": [(0, 0), (1, 3)]}, "pins need an expert group in two places"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        eplb.solve(np.ones((1, 8)), Cluster(1, 4), **changes)


def test_dead_devices_hold_nothing_and_by_default_the_others_hold_all_experts_in_as_few_slots_as_do() -> None:
    found = eplb.solve(np.ones((2, 8)), Cluster(1, 4), dead=[1]).placement
    assert found.slots.tolist() == [3, 0, 3, 3]
    assert found.holds(1)[:, [0, 2, 3]].any(axis=1).all()


@pytest.mark.parametrize(
    "changes",
    [{"method": "best"}, {"groups": "half"}, {"quantile": 0.5}, {"num_groups": 0}, {"num_groups": -2}],
    ids=str,
)
def test_unknown_choices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        eplb.solve(np.ones((1, 8)), Cluster(1, 4), **changes)
