import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.cost import hops_kept
from moeplan.solvers.exflow import strategy, whole
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import keeps_groups_whole

Array = NDArray[Any]
KNOWN: dict[str, Any] = {"groups": "whole", "time_limit_s": 1.0}


def routed(rng: np.random.Generator, num_layers: int, num_experts: int) -> Array:
    return rng.poisson(rng.lognormal(1, 1, (num_layers - 1, num_experts, num_experts))).astype(float)


@pytest.mark.parametrize(
    ("shape", "num_groups"), [("1x2", 8), ("2x2", 4), ("1x8", 4), ("2x4", 4), ("4x4", 2), ("1x16", 16), ("2x2", 2)]
)
@pytest.mark.parametrize("paired", [False, True])
def test_groups_stay_whole_on_any_cluster_and_the_objective_is_the_placement_s(
    shape: str, num_groups: int, paired: bool, rng: np.random.Generator
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
    assert found.outcome.bound is not None
    better = found.outcome.bound - found.outcome.objective.value
    assert (better if found.outcome.objective.sense == "max" else -better) >= -1e-9


def test_where_a_device_holds_whole_groups_it_is_the_best_of_all_such_placements(rng: np.random.Generator) -> None:
    weights = routed(rng, 3, 12)
    groups = weights.reshape(2, 4, 3, 4, 3).sum(axis=(2, 4))
    homes = [np.array(h) for h in itertools.product((0, 1), repeat=4) if sum(h) == 2]
    best = max(
        sum(float(w[a[:, None] == b].sum()) for w, a, b in zip(groups, path[:-1], path[1:], strict=True))
        for path in ((x, y, z) for x in homes for y in homes for z in homes)
    )
    found = exflow.solve(weights, Cluster(1, 2), num_groups=4, **KNOWN)
    assert found.outcome.objective.value == pytest.approx(best / weights.sum())


def test_where_groups_fill_devices_their_experts_follow_each_other(rng: np.random.Generator) -> None:
    # Expert e goes to order[e], which keeps groups of four together: everything can stay on its device.
    order = np.concatenate([4 + rng.permutation(4), rng.permutation(4)])
    weights = np.zeros((1, 8, 8))
    weights[0, np.arange(8), order] = 1
    found = exflow.solve(weights, Cluster(1, 4), num_groups=2, **KNOWN)
    assert found.outcome.objective.value == 1


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
    assert found.outcome.objective.value == 1


@pytest.mark.parametrize(("devices", "num_groups"), [(4, 8), (8, 2)])
def test_time_that_runs_out_leaves_whole_groups_and_is_said(
    devices: int, num_groups: int, rng: np.random.Generator
) -> None:
    known = KNOWN | {"time_limit_s": 1e-6}
    found = exflow.solve(routed(rng, 4, 16), Cluster(1, devices), num_groups=num_groups, **known)
    assert keeps_groups_whole(found.placement, num_groups)
    assert found.outcome.status is Status.TIME_LIMIT


def test_work_is_a_cap_on_all_searches_together(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def within(search: whole.Search, budget: Budget) -> whole.Search:
        given.append(budget.left)
        return partial(search, work=1e5, time_limit_s=1.0)

    monkeypatch.setattr(whole, "_within", within)
    exflow.solve(routed(rng, 3, 32), Cluster(1, 16), num_groups=8, work=1e6, **KNOWN)
    assert len(given) == 9
    assert sum(given) == pytest.approx(1e6)


def test_groups_of_no_known_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="split or whole"):
        exflow.solve(np.ones((1, 8, 8)), Cluster(1, 4), **KNOWN | {"groups": "half"})


def test_a_cap_on_loads_holds_for_whole_groups(rng: np.random.Generator) -> None:
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
def test_what_whole_groups_do_not_go_with_is_refused_before_any_bound(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "bound_simply", None)
    with pytest.raises(UsageError, match=message):
        exflow.solve(np.ones((1, 8, 8)), Cluster(1, 4), **KNOWN, **changes)
