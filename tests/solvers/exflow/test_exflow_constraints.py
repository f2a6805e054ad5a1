"""What placements must keep: whole expert groups, caps on loads, slots for replicas."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow import caps, strategy
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.caps import capped_layout
from moeplan.solvers.exflow.replicas import with_replicas
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import Placement, keeps_groups_whole
from tests.builders import known
from tests.solvers.builders import Array, programme_of

KNOWN: dict[str, Any] = {"groups": "whole", "time_limit_s": 1.0}


def routed(rng: Generator, num_layers: int, num_experts: int) -> Array:
    return rng.poisson(rng.lognormal(1, 1, (num_layers - 1, num_experts, num_experts))).astype(float)


@pytest.mark.parametrize(
    ("shape", "num_groups"), [("1x2", 8), ("2x2", 4), ("1x8", 4), ("2x4", 4), ("4x4", 2), ("1x16", 16), ("2x2", 2)]
)
@pytest.mark.parametrize("paired", [False, True])
def test_groups_stay_whole_on_any_cluster_and_the_objective_is_the_placement_s(
    shape: str, num_groups: int, paired: bool, rng: Generator
) -> None:
    cluster, weights = Cluster.parse(shape), routed(rng, 3, 16)
    pairs = rng.poisson(2.0, (3, 16, 16)).astype(float) if paired else None
    found = exflow.solve(weights, cluster, coactivation=pairs, num_groups=num_groups, **KNOWN)
    assert keeps_groups_whole(found.placement, num_groups)
    kept = hops_kept(weights, found.placement, cluster.devices_per_node)
    if not paired:
        share, on_nodes = kept.device.sum() / weights.sum(), kept.node.sum() / weights.sum()
        value = share if cluster.num_nodes == 1 else 8 - 7 * on_nodes - share
        assert found.outcome.objective.value == pytest.approx(value)
    better = known(found.outcome.bound) - found.outcome.objective.value
    assert (better if found.outcome.objective.sense == "max" else -better) >= -1e-9


def test_where_a_device_holds_whole_groups_it_is_the_best_of_all_such_placements(rng: Generator) -> None:
    weights = routed(rng, 3, 12)
    groups = weights.reshape(2, 4, 3, 4, 3).sum(axis=(2, 4))
    homes = [np.array(h) for h in itertools.product((0, 1), repeat=4) if sum(h) == 2]
    best = max(
        sum(float(w[a[:, None] == b].sum()) for w, a, b in zip(groups, path[:-1], path[1:], strict=True))
        for path in ((x, y, z) for x in homes for y in homes for z in homes)
    )
    found = exflow.solve(weights, Cluster(1, 2), num_groups=4, **KNOWN)
    assert found.outcome.objective.value == pytest.approx(best / weights.sum())


def test_what_stays_in_a_block_but_on_none_of_its_devices_is_not_taken_for_what_stays() -> None:
    # Of 22 tokens of an expert 10 keep its id, 12 go to the other group, 3 to each there: blocks keep more of these.
    across = np.kron([[0.0, 1.0], [1.0, 0.0]], np.full((4, 4), 3.0))
    found = exflow.solve((10 * np.eye(8) + across)[None], Cluster(1, 4), num_groups=2, **KNOWN)
    assert found.outcome.objective.value >= 10 / 22 * (1 - 1e-12)


@pytest.mark.parametrize(("devices", "num_groups"), [(2, 4), (4, 2)])
def test_one_layer_is_placed_by_what_its_tokens_choose_together(devices: int, num_groups: int) -> None:
    # Neighbours in the order 0, 2, 1, 3, 4, 6, 5, 7 are chosen together.
    pairs = np.zeros((1, 8, 8))
    pairs[0, [0, 1, 4, 5], [2, 3, 6, 7]] = 1
    found = exflow.solve(np.zeros((0, 8, 8)), Cluster(1, devices), coactivation=pairs, num_groups=num_groups, **KNOWN)
    assert keeps_groups_whole(found.placement, num_groups)
    assert (found.outcome.objective.name, found.outcome.objective.value) == ("affinity_kept", 1)


@pytest.mark.parametrize(("devices", "num_groups"), [(4, 8), (8, 2)])
def test_time_that_runs_out_is_said_of_whole_groups(devices: int, num_groups: int, rng: Generator) -> None:
    weights, late = routed(rng, 4, 16), KNOWN | {"time_limit_s": 1e-6}
    found = exflow.solve(weights, Cluster(1, devices), num_groups=num_groups, **late)
    assert keeps_groups_whole(found.placement, num_groups)
    assert found.outcome.status is Status.TIME_LIMIT


def test_a_cap_on_loads_holds_for_whole_groups(rng: Generator) -> None:
    weights, loads = routed(rng, 2, 8), np.array([[9.0, 9, 9, 9, 1, 1, 1, 1]] * 2)
    found = exflow.solve(weights, Cluster(1, 2), loads=loads, max_load=1.1, num_groups=4, **KNOWN)
    held = np.stack([found.placement.holds(layer) for layer in range(2)])
    assert (np.einsum("le,led->ld", loads, held) == 20).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "without expert groups"),
        ({"num_groups": 3}, "8 experts in 3 groups"),
        ({"num_groups": 0}, "8 experts in 0 groups"),
        ({"num_groups": 2, "slots": 3}, "12 slots"),
        ({"num_groups": 2, "max_load": 1.5}, "max load 1.5 for whole groups of 2 devices"),
    ],
    ids=str,
)
def test_what_whole_groups_do_not_go_with_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "bound_simply", None)
    with pytest.raises(UsageError, match=message):
        exflow.solve(np.ones((1, 8, 8)), Cluster(1, 4), **KNOWN, **changes)


def highest(load_E: NDArray[Any], device_E: Any, slots: list[int]) -> float:
    return float(np.bincount(np.array(device_E), load_E, len(slots)).max())


def least_cap(loads: NDArray[Any], slots: list[int]) -> float:
    """The smallest cap over the mean that some placement keeps, by trying all."""
    deals = set(itertools.permutations([device for device, count in enumerate(slots) for _ in range(count)]))
    most_L = np.array([min(highest(load_E, deal, slots) for deal in deals) for load_E in loads])
    return float((most_L / loads.mean(axis=1)).max() * np.count_nonzero(slots) / loads.shape[1])


@pytest.mark.parametrize("slots", [[2, 2, 2], [3, 2, 1], [3, 3], [2, 4], [3, 0, 3]], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_a_cap_is_kept_or_refused_with_the_smallest_that_is(slots: list[int], seed: int) -> None:
    loads = np.random.default_rng(seed).integers(1, [5, 50, 1000][seed % 3], (3, 6)) / (seed + 1)
    least = least_cap(loads, slots)
    for cap in (max(1.0, least * (1 + 1e-7)), max(1.0, least * 1.05)):
        layout, cap_L, hurried = capped_layout(loads, np.array(slots), cap, time_limit_s=60)
        assert not hurried
        for load_E, device_E, most in zip(loads, layout, cap_L, strict=True):
            assert np.bincount(device_E, minlength=len(slots)).tolist() == slots
            assert highest(load_E, device_E, slots) <= most
    if least > 1.001:
        worst = int(np.argmax([least_cap(loads[[layer]], slots) for layer in range(3)]))
        with pytest.raises(UsageError, match=f"layer {worst} .* the smallest that any placement keeps") as refused:
            capped_layout(loads, np.array(slots), 1.0, time_limit_s=60)
        given = float(str(refused.value).split("give ")[1].split()[0])
        assert least <= given <= least + 1.01e-4


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_unproven_layer_spoils_no_proof_of_a_needier_one(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    hard, harder = [11, 10, 10, 19, 1, 3, 8, 15, 14], [60, 1, 1, 1, 1, 1, 1, 1, 1]  # 62 of 68 on one of three
    real = caps._evenest
    monkeypatch.setattr(caps, "_evenest", lambda load, *given: (real(load, *given)[0], load.max() == 60))
    with pytest.raises(UsageError, match=rf"give {62 * 3 / 68 + 5e-5:.4f} or more, the smallest that any"):
        capped_layout(np.array([hard, harder], float)[order], np.array([3, 3, 3]), 1.0, time_limit_s=60)


def test_where_the_layer_that_needs_most_is_unproven_no_placement_is_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = caps._evenest
    monkeypatch.setattr(caps, "_evenest", lambda load, *given: (real(load, *given)[0], load.max() < 60))
    with pytest.raises(UsageError, match=r"no placement of layer 1 was found .* give 2\.7353 or more") as refused:
        capped_layout(np.array([[1] * 9, [60] + [1] * 8], float), np.array([3, 3, 3]), 1.0, time_limit_s=60)
    assert "any placement keeps" not in str(refused.value)


# Experts 0 and 1 live on device 0, experts 2 and 3 on device 1, one slot is free on each; expert 3 has the load.
WEIGHT = np.array([[9.0, 0, 8, 0], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
LOADS = np.array([[1.0, 1, 1, 99], [1.0, 1, 1, 99]])
LAYOUT = [np.array([0, 0, 1, 1])] * 2


def kept(placement: Placement) -> float:
    return float(hops_kept(WEIGHT[None], placement, 2).device.sum())


@pytest.mark.parametrize(
    ("worth", "limit_s", "loads_count"),
    [(kept, 60, False), (lambda _: 0.0, 60, True), (lambda _: 0.0, 0, False)],
    ids=["what follows keeps more", "what follows keeps no more", "out of time"],
)
def test_free_slots_hold_what_follows_unless_the_highest_loads_are_worth_no_less(
    worth: Any, limit_s: float, loads_count: bool
) -> None:
    programme = programme_of(WEIGHT[None], [3, 3])
    _, found = with_replicas(programme, LAYOUT, LOADS, worth, Budget(0, limit_s))
    for layer in (0, 1):
        replicas = np.flatnonzero(found.holds(layer).sum(axis=1) > 1).tolist()
        assert 3 in replicas if loads_count else replicas == [0, 2]


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
    assert known(found.bound) >= found.objective.value


def test_devices_that_hold_nothing_get_different_experts() -> None:
    wide = programme_of(np.eye(4)[None], [1] * 7)
    _, found = with_replicas(wide, [np.arange(4)] * 2, LOADS, lambda _: 0.0, Budget(0, 0))
    assert sorted(found.physical_to_logical[0].tolist()) == [0, 0, 1, 1, 2, 2, 3]
    assert (found.physical_to_logical[0] == found.physical_to_logical[1]).all()
