"""Solves by ExFlow: placements within their bounds, simple and thorough, and what ends a search."""

import itertools
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers import exflow
from moeplan.solvers.exflow import bounded, methods, strategy
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import Placement, ReplicaRule
from tests.builders import known
from tests.solvers.builders import Array, brute_force, skewed


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (methods, strategy):
        monkeypatch.setattr(module, "SWEEPS_WORK", 4e7)
    monkeypatch.setattr(strategy, "ANNEALING_RATE", 1e5)


def mean_cost(weights: Array, placement: Placement, cost: Array) -> float:
    """The mean cost of a transition, token by token, from nothing but the table of slots."""
    device = np.zeros((placement.num_layers, placement.num_experts), dtype=int)
    first = 0
    for d, size in enumerate(placement.slots.tolist()):
        for layer in range(placement.num_layers):
            device[layer, placement.physical_to_logical[layer, first : first + size]] = d
        first += size
    total = sum(weights[i, a, b] * cost[device[i, a], device[i + 1, b]] for i, a, b in np.ndindex(weights.shape))
    return float(total / weights.sum())


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([(1, 4), (2, 2), (4, 1), (2, 3), (3, 2)]), st.sampled_from([12, 24]))
def test_the_objective_is_the_placements_and_its_bound_holds(
    seed: int, shape: tuple[int, int], num_experts: int
) -> None:
    links = {"intra": Link(0, 1e-11), "inter": Link(0, 4e-11)}
    cluster, weights = Cluster(*shape, links), skewed(seed, 4, num_experts)
    node = np.arange(cluster.num_devices) // shape[1]
    cost = np.where(node[:, None] == node, 1.0, 4.0) - np.eye(cluster.num_devices)
    found = exflow.solve(weights, cluster, seed=seed % 7, time_limit_s=60)
    outcome = found.outcome
    assert outcome.bound is not None
    if shape[0] == 1:
        assert outcome.objective.name == "hops_kept"
        assert outcome.objective.value == pytest.approx(1 - mean_cost(weights, found.placement, cost))
        assert outcome.objective.value <= outcome.bound <= 1
    else:
        assert outcome.objective.name == "hop_cost"
        assert outcome.objective.value == pytest.approx(mean_cost(weights, found.placement, cost))
        assert 0 <= outcome.bound <= outcome.objective.value
    assert found.placement.replica_rule is ReplicaRule.NEAREST


@settings(max_examples=60)
@given(st.data())
def test_any_experts_and_slots_give_a_legal_placement_within_its_bound(data: st.DataObject) -> None:
    nodes, group, num_experts = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)))
    slots = data.draw(st.lists(st.integers(0, num_experts), min_size=nodes * group, max_size=nodes * group))
    slots[-1] = num_experts if sum(slots) < num_experts else slots[-1]
    weights = skewed(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 4)), num_experts)
    found = exflow.solve(weights, Cluster(nodes, group), slots=slots, time_limit_s=60)
    outcome = found.outcome
    assert found.placement.slots.tolist() == slots  # Placement itself refuses whatever else is wrong
    worse, better = sorted([outcome.objective.value, known(outcome.bound)], reverse=outcome.objective.sense == "min")
    assert outcome.objective.value == pytest.approx(worse, abs=1e-12)
    assert better >= 0


def test_a_cost_of_nothing_is_bounded_by_no_less_than_nothing() -> None:
    found = exflow.solve(skewed(3, 3, 2), Cluster(3, 3), slots=[0, 2, 2, 2, 0, 0, 0, 2, 2], time_limit_s=60).outcome
    assert found.bound == 0 <= found.objective.value < 1e-12


def test_surplus_slots_go_to_the_highest_loads_a_replica_where_nothing_else_counts() -> None:
    loads = np.array([[9.0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 8.0], [1, 1, 4, 4, 1, 1]])
    found = exflow.solve(np.zeros((2, 6, 6)), Cluster(1, 4), loads=loads)
    counts = [np.bincount(row, minlength=6).tolist() for row in found.placement.physical_to_logical]
    assert counts == [[3, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 3], [1, 1, 2, 2, 1, 1]]


def test_every_expert_everywhere_keeps_every_hop() -> None:
    found = exflow.solve(skewed(1, 3, 4), Cluster(1, 3), slots=4)
    assert found.outcome.objective.value == 1
    assert found.outcome.status is Status.OPTIMAL


@pytest.mark.parametrize("scale", [1, 1e-7])
@pytest.mark.parametrize("shape", [(1, 5), (5, 1)])
def test_one_expert_a_device_is_proven_optimal(scale: float, shape: tuple[int, int]) -> None:
    weights = skewed(3, 4, 5) * scale
    found = exflow.solve(weights, Cluster(*shape)).outcome
    kept = brute_force(weights, [1] * 5, np.eye(5)) / weights.sum()
    assert (found.status, found.gap, found.bound_kind) == (Status.OPTIMAL, 0, "assignment")
    assert found.objective.value == pytest.approx(kept if shape[0] == 1 else 8 * (1 - kept))


@pytest.mark.parametrize(("cluster", "name"), [(Cluster(1, 2), "hops_kept"), (Cluster(2, 2), "hop_cost")])
@pytest.mark.parametrize("weights", [np.zeros((2, 4, 4)), np.zeros((0, 4, 4), dtype=int)])
def test_without_transitions_nothing_hops(cluster: Cluster, name: str, weights: Array) -> None:
    found = exflow.solve(weights, cluster)
    assert found.outcome.objective.name == name
    assert found.outcome.objective.value == (1 if name == "hops_kept" else 0)
    assert (found.outcome.status, found.outcome.gap) == (Status.OPTIMAL, 0)
    assert found.placement.num_layers == len(weights) + 1


@pytest.mark.parametrize("after", [1, 3])
def test_ctrl_c_gives_the_best_found_so_far(after: int) -> None:
    seen: list[float] = []

    def interrupt(value: float) -> None:
        seen.append(value)
        if len(seen) == after:
            raise KeyboardInterrupt

    found = exflow.solve(skewed(6, 8, 32), Cluster(1, 4), on_progress=interrupt)
    assert found.outcome.status is Status.INTERRUPTED
    assert found.outcome.objective.value == pytest.approx(seen[-1])
    assert seen == sorted(seen)


def test_the_time_limit_is_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "ANNEALING_RATE", 1e12)
    found = exflow.solve(skewed(7, 16, 64), Cluster(1, 8), time_limit_s=1.0)
    assert found.outcome.status is Status.TIME_LIMIT
    assert found.outcome.wall_s < 60  # unlimited, this work takes hours


@pytest.mark.parametrize("method", ["annealing", "sweeps", "ilp"])
@pytest.mark.parametrize("slots", [8, 10])
def test_next_to_no_time_gives_a_bounded_placement(method: Literal["annealing", "sweeps", "ilp"], slots: int) -> None:
    found = exflow.solve(skewed(8, 24, 64), Cluster(2, 4), slots=slots, method=method, time_limit_s=1e-3)
    assert found.placement.slots.tolist() == [slots] * 8
    assert found.outcome.status is Status.TIME_LIMIT
    assert "row" in known(found.outcome.bound_kind)
    assert 0 <= known(found.outcome.bound) <= found.outcome.objective.value


def test_bounds_take_no_more_than_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "BOUND_SHARE", 1e-6)
    found = exflow.solve(skewed(9, 20, 64), Cluster(8, 4), time_limit_s=1.0).outcome
    assert "row" in known(found.bound_kind)


@pytest.mark.parametrize(("cluster", "name"), [(Cluster(1, 4), "hops_kept"), (Cluster(2, 2), "hop_cost")])
def test_with_replicas_the_objective_is_named_an_expectation(cluster: Cluster, name: str) -> None:
    weights = skewed(10, 3, 8)
    assert exflow.solve(weights, cluster, slots=2).outcome.objective.name == name
    assert exflow.solve(weights, cluster, slots=3).outcome.objective.name == f"expected_{name}"


SHAPELESS = [np.ones(shape) for shape in ((), (3,), (3, 3), (1, 3, 4), (1, 0, 0))]
NO_COUNTS = [np.full((1, 2, 2), value) for value in (-1.0, np.nan, np.inf, 1e308, 1j, "a")]


@pytest.mark.parametrize("transitions", [*SHAPELESS, *NO_COUNTS])
def test_transitions_that_are_none_are_refused(transitions: Array) -> None:
    with pytest.raises(ValueError, match=r"transitions .*expected"):
        exflow.solve(transitions, Cluster(1, 2))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"loads": np.ones((1, 4))}, ValueError),
        ({"loads": -np.ones((3, 4))}, ValueError),
        ({"method": "guess"}, ValueError),
        ({"backend": "abacus"}, ValueError),
        ({"groups": "half"}, ValueError),
        ({"time_limit_s": 0}, ValueError),
        ({"time_limit_s": float("nan")}, ValueError),
        ({"slots": 1}, UsageError),
        ({"slots": [4, 4, 4]}, UsageError),
        ({"slots": 5}, UsageError),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        exflow.solve(skewed(0, 3, 4), Cluster(1, 2), **options)


def test_absurd_clusters_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(UsageError, match="65,536 devices"):
        exflow.solve(skewed(0, 2, 4), Cluster(1, 65_536))


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
    share = known(simple.bound) if cluster.num_nodes == 1 else 8 - known(simple.bound)  # a hop between nodes costs 8
    assert found.thorough.bound.value < share * weights.sum()


def test_the_bound_of_devices_and_nodes_holds_for_every_placement() -> None:
    weights = skewed(7, num_experts=4)
    near = np.kron(np.eye(2), np.ones((2, 2))) * 7 + np.eye(4)
    simple, found = (solved(weights, Cluster(2, 2), bound=kind).thorough for kind in ("simple", "thorough"))
    assert list(found.proofs) == ["node"]
    assert found.reasons == {"device": "one expert a device"}
    assert simple.bound.value > found.bound.value >= brute_force(weights, [1] * 4, near) * (1 - 1e-12)


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
