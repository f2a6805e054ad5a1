"""The bounds of a solve: the thorough one after the search, and that of pairs inside layers."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.exflow import bounded, strategy
from moeplan.solvers.outcome import Outcome, Status
from tests.builders import known
from tests.solvers.builders import brute_force, skewed


def solved(weights: NDArray[Any], cluster: Cluster, **changes: Any) -> exflow.strategy.ExflowResult:
    return exflow.solve(weights, cluster, time_limit_s=100, work=1e6, **changes)


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(2, 2), Cluster(4, 1)], ids=str)
def test_a_thorough_bound_is_between_the_simple_one_and_the_value(cluster: Cluster) -> None:
    weights = skewed(1)
    simple = solved(weights, cluster).outcome
    found = solved(weights, cluster, bound="thorough", bound_time_limit_s=20).outcome
    sign = 1 if found.objective.sense == "max" else -1
    assert found.objective == simple.objective
    assert sign * known(simple.bound) > sign * known(found.bound) >= sign * found.objective.value - 1e-9
    assert found.bound_kind == "three-layer" or found.status is Status.OPTIMAL


def test_the_thorough_bound_reports_ever_smaller_shares() -> None:
    shares: list[float] = []
    found = solved(skewed(2), Cluster(1, 4), bound="thorough", on_bound=shares.append).outcome
    assert shares == sorted(shares, reverse=True)
    assert found.bound == pytest.approx(shares[-1], abs=1e-3)


def test_ctrl_c_before_the_thorough_bound_has_begun_leaves_the_simple_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    simple = solved(skewed(3), Cluster(1, 4)).outcome
    monkeypatch.setattr(bounded, "thorough_bound", interrupted)
    found = solved(skewed(3), Cluster(1, 4), bound="thorough")
    assert found.outcome.status is Status.INTERRUPTED
    assert (found.outcome.bound, found.outcome.bound_kind) == (simple.bound, simple.bound_kind)
    assert not found.thorough.proofs


@pytest.mark.parametrize("cluster", [Cluster(1, 4), Cluster(2, 2)], ids=str)
def test_ctrl_c_during_the_thorough_bound_leaves_the_best_one_so_far(cluster: Cluster) -> None:
    shares = list[float]()

    def interrupt(share: float) -> None:
        shares.append(share)
        if len(shares) == 3:
            raise KeyboardInterrupt

    weights = skewed(3)
    simple = solved(weights, cluster).outcome
    found = solved(weights, cluster, bound="thorough", on_bound=interrupt)
    assert found.outcome.status is Status.INTERRUPTED
    assert len(shares) == 3
    assert "three-layer" in str(found.outcome.bound_kind)
    assert list(found.thorough.proofs) == ["device"]
    assert found.thorough.bound.value < thorough_value(simple, cluster, weights.sum())


def thorough_value(simple: Outcome, cluster: Cluster, total: float) -> float:
    """A bound on the figure as one on the value of `problem.Goal`: links unknown, a hop between nodes costs 8."""
    assert simple.bound is not None
    return total * (simple.bound if cluster.num_nodes == 1 else 8 - simple.bound)


def test_the_bound_of_devices_and_nodes_holds_for_every_placement() -> None:
    weights = skewed(7, num_experts=4)
    near = np.kron(np.eye(2), np.ones((2, 2))) * 7 + np.eye(4)
    simple, found = (solved(weights, Cluster(2, 2), bound=kind).thorough for kind in ("simple", "thorough"))
    assert list(found.proofs) == ["node"]
    assert found.reasons == {"device": "one expert a device"}
    assert simple.bound.value > found.bound.value >= brute_force(weights, [1] * 4, near) * (1 - 1e-12)


def test_where_groups_are_too_many_the_reason_is_told() -> None:
    found = solved(skewed(8, 3, 32), Cluster(1, 2), bound="thorough")
    assert found.outcome.bound_kind != "three-layer"
    assert "6.0e+08 groups" in found.thorough.reasons["device"]


def test_a_proven_placement_is_not_bounded_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "bound_thoroughly", None)
    assert solved(skewed(4), Cluster(1, 8), bound="thorough").outcome.status is Status.OPTIMAL


def test_no_way_to_put_a_layers_experts_together_keeps_more_pairs_than_the_bound() -> None:
    rng = np.random.default_rng(5)
    for _ in range(5):
        pairs = np.triu(rng.integers(0, 90, (6, 6)), 1)
        best = max(
            sum(pairs[a, b] for a, b in itertools.combinations(range(6), 2) if place[a] == place[b])
            for place in set(itertools.permutations((0, 0, 0, 1, 1, 1)))
        )
        found = solved(np.zeros((0, 6, 6)), Cluster(1, 2), coactivation=pairs[None]).outcome
        assert known(found.bound) * pairs.sum() >= best * (1 - 1e-9)


def test_a_thorough_bound_of_pairs_and_an_unknown_one_are_refused() -> None:
    weights = skewed(6)
    with pytest.raises(UsageError, match="transitions alone"):
        solved(weights, Cluster(1, 4), coactivation=np.ones((4, 8, 8)), bound="thorough")
    for wrong in ({"bound": "perfect"}, {"bound": "thorough", "bound_time_limit_s": 0.0}):
        with pytest.raises(ValueError, match="simple or thorough"):
            solved(weights, Cluster(1, 4), **wrong)
