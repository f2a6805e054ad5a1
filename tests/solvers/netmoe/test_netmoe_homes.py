"""NetMoE's homes of samples against naive counts: by every method, step by step; their locality and prediction."""

import itertools
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers import netmoe
from moeplan.solvers.cost import inter_ratio
from moeplan.solvers.netmoe.bottleneck import Channels
from moeplan.solvers.netmoe.port_bound import least_time
from moeplan.solvers.outcome import Status
from tests.builders import known
from tests.solvers.builders import Array, naive_loads

LINKS = dict(map(Link.parse, ["intra=400:2", "inter=50:9"]))
SLOW_INSIDE = dict(map(Link.parse, ["intra=50:9", "inter=90:2"]))


@dataclass(frozen=True)
class Case:
    counts: Array
    next_counts: Array | None
    experts: Array
    cluster: Cluster
    capacity: Array


@st.composite
def cases(draw: st.DrawFn, largest: int = 12) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cluster = Cluster(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([{}, LINKS, SLOW_INSIDE])))
    num_samples, num_experts = draw(st.integers(1, largest)), draw(st.integers(1, 7))
    counts, following = rng.integers(0, 9, (2, num_samples, num_experts)) * rng.integers(0, 2, (2, num_samples, 1))
    dealt = rng.multinomial(
        num_samples + draw(st.integers(0, 3)), np.full(cluster.num_devices, 1 / cluster.num_devices)
    )
    experts = rng.integers(0, cluster.num_devices, num_experts)
    return Case(counts, following if draw(st.booleans()) else None, experts, cluster, dealt)


def naive_value(case: Case, home: Array, objective: str, copy_bytes: float) -> float:
    links, group, total = case.cluster.links, case.cluster.devices_per_node, 0.0
    for counts in (case.counts, case.next_counts):
        if counts is None:
            continue
        inter, intra, _, busiest_intra, busiest_inter = naive_loads(counts, case.experts, home, case.cluster)
        ratio = max(1.0, links["inter"].s_per_byte / links["intra"].s_per_byte) if links else 8.0
        if objective == "sum":
            total += ratio * inter + intra
        elif links:
            intra_s = links["intra"].latency_s + links["intra"].s_per_byte * busiest_intra * copy_bytes
            inter_s = links["inter"].latency_s + links["inter"].s_per_byte * busiest_inter * copy_bytes
            total += max(intra_s * (group > 1), inter_s * (case.cluster.num_nodes > 1))
        else:
            total += max(busiest_intra, ratio * busiest_inter)
    return total


def solve(case: Case, **options: Any) -> netmoe.NetMoeResult:
    options = {"next_counts": case.next_counts, "capacity": case.capacity} | options
    return netmoe.solve(case.counts, case.experts, case.cluster, **options)


def all_homes(case: Case) -> list[Array]:
    homes = itertools.product(range(case.cluster.num_devices), repeat=len(case.counts))
    return [np.array(home) for home in homes if all(home.count(d) <= c for d, c in enumerate(case.capacity))]


def inter_copies(found: netmoe.NetMoeResult) -> float:
    return found.gather.inter + (found.scatter.inter if found.scatter else 0)


@settings(max_examples=50)
@given(cases(), st.sampled_from(["sum", "bottleneck"]), st.sampled_from([1, 2]))
def test_the_objective_is_what_a_naive_count_of_every_copy_gives(case: Case, objective: Any, stages: Any) -> None:
    found = solve(case, objective=objective, stages=stages, copy_bytes=1000.0)
    home = found.device_of_sample
    assert (np.bincount(home, minlength=case.cluster.num_devices) <= case.capacity).all()
    assert found.outcome.objective.value == pytest.approx(naive_value(case, home, objective, 1000.0), rel=1e-12)
    for counts, told in ((case.counts, found.gather), (case.next_counts, found.scatter)):
        if counts is None:
            assert told is None
        else:
            assert told is not None
            naive = naive_loads(counts, case.experts, home, case.cluster)
            assert (told.inter, told.intra, told.busiest_inter, told.busiest_intra) == naive[:4]


@settings(max_examples=40)
@given(cases(largest=4), st.sampled_from(["sum", "bottleneck"]), st.sampled_from([1, 2]))
def test_no_homes_beat_the_bound_and_what_is_called_optimal_is(case: Case, objective: Any, stages: Any) -> None:
    found = solve(case, objective=objective, stages=stages, copy_bytes=1000.0)
    values = [naive_value(case, home, objective, 1000.0) for home in all_homes(case)]
    outcome = found.outcome
    assert known(outcome.bound) <= min(values) * (1 + 1e-9)
    assert outcome.objective.value >= min(values) * (1 - 1e-9)
    if outcome.status is Status.OPTIMAL or (objective == "sum" and stages == 1):
        assert outcome.objective.value == pytest.approx(min(values), rel=1e-9)


@settings(max_examples=25)
@given(cases(), st.booleans(), st.sampled_from([1, 2]))
def test_every_method_finds_homes_as_good_as_those_of_kuhn_munkres(case: Case, shares: bool, stages: Any) -> None:
    options: dict[str, Any] = {"stages": stages}
    if case.next_counts is not None and shares:
        options["next_counts"] = case.next_counts / 3
    found = [solve(case, method=method, **options) for method in ("km", "flow", "transport")]
    least = [one.outcome.objective.value if stages == 1 else inter_copies(one) for one in found]
    assert least == pytest.approx([least[0]] * 3, rel=1e-9)


@settings(max_examples=20)
@given(cases(largest=7))
def test_no_swap_and_no_move_to_a_free_place_shortens_what_is_refined(case: Case) -> None:
    found = solve(case, objective="bottleneck", copy_bytes=1000.0)
    home, least = found.device_of_sample, found.outcome.objective.value * (1 - 1e-8)
    for i in range(len(home)):
        neighbours = [np.where(np.arange(len(home)) == i, d, home) for d in range(len(case.capacity))]
        for j in range(i):
            swapped = home.copy()
            swapped[[i, j]] = home[[j, i]]
            neighbours.append(swapped)
        for other in neighbours:
            if (np.bincount(other, minlength=len(case.capacity)) <= case.capacity).all():
                assert naive_value(case, other, "bottleneck", 1000.0) >= least


def test_swaps_relieve_a_device_that_the_sum_overloads_and_the_bound_comes_near() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 80, (24, 8)) * rng.integers(1, 12, (24, 1))
    case = Case(counts, None, np.arange(8), Cluster(4, 2), np.full(8, 3))
    outcome = solve(case, objective="bottleneck").outcome
    assert outcome.objective.name == "busiest_cost"
    assert outcome.objective.value < 0.95 * naive_value(case, solve(case).device_of_sample, "bottleneck", 1.0)
    assert known(outcome.gap) < 0.1


@settings(max_examples=30)
@given(cases())
def test_shares_of_one_whole_device_are_the_map(case: Case) -> None:
    shares = np.eye(case.cluster.num_devices)[case.experts]
    found = netmoe.solve(case.counts, shares, case.cluster, next_counts=case.next_counts, capacity=case.capacity)
    assert found.device_of_sample.tolist() == solve(case).device_of_sample.tolist()


def test_replicas_on_two_nodes_draw_a_sample_to_neither() -> None:
    shares = np.array([[0.5, 0.5], [0.0, 1.0]])
    traffic = netmoe.traffic_of([[4, 0], [2, 6]], shares, Cluster(2, 1))
    assert traffic.gather.tolist() == [[2, 2], [1, 7]]
    assert netmoe.solve([[4, 0], [2, 6]], shares, Cluster(2, 1)).device_of_sample.tolist() == [0, 1]


def test_samples_share_devices_evenly_unless_told_otherwise(rng: np.random.Generator) -> None:
    counts = rng.integers(0, 9, (24, 6))
    found = netmoe.solve(counts, np.arange(6), Cluster(3, 2))
    assert np.bincount(found.device_of_sample).tolist() == [4] * 6
    uneven = [0, 24, 0, 0, 0, 1]
    found = netmoe.solve(counts, np.arange(6), Cluster(3, 2), capacity=uneven)
    assert (np.bincount(found.device_of_sample, minlength=6) <= uneven).all()


def test_the_next_layer_may_lie_elsewhere() -> None:
    counts, cluster = np.array([[5, 0], [0, 5]]), Cluster(2, 1)
    found = netmoe.solve(counts, [0, 1], cluster, next_counts=2 * counts, next_expert_to_device=[1, 0])
    assert found.device_of_sample.tolist() == [1, 0]
    assert (found.gather.inter, known(found.scatter).inter) == (10, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"counts": [[-1, 2]]}, "counts contain -1"),
        ({"counts": [[np.nan, 2.0]]}, "counts contain nan"),
        ({"counts": [[1, 2, 3]]}, r"counts of shape \[1, 3\]"),
        ({"counts": np.zeros((0, 2))}, "counts of shape"),
        ({"next_counts": [[1, 2], [3, 4]]}, "next_counts of shape"),
        ({"expert_to_device": [0, 4]}, "devices 0 to 4; expected 0 to 3"),
        ({"expert_to_device": np.full((2, 4), 0.3)}, "shares of expert 0 sum to 1.2"),
        ({"expert_to_device": [[0.5, 0.5]] * 2}, r"shares of expert_to_device of shape \[2, 2\]"),
        ({"capacity": [1, 2]}, "capacity .*expected one non-negative integer or 4"),
        ({"capacity": -1}, "capacity -1"),
        ({"objective": "mean"}, "expected sum or bottleneck"),
        ({"stages": 3}, "3 stages"),
        ({"copy_bytes": 0.0}, "more than 0"),
        ({"method": "simplex"}, "expected one of transport, flow, km, pulp"),
    ],
)
def test_misuse_is_refused_with_what_was_expected(changes: dict[str, Any], told: str) -> None:
    request: dict[str, Any] = {"counts": [[1, 2]], "expert_to_device": [0, 3], "cluster": Cluster(2, 2)} | changes
    with pytest.raises(ValueError, match=told):
        netmoe.solve(**request)


def test_importing_the_solver_loads_nothing_heavy() -> None:
    heavy = "{'numba', 'scipy', 'ortools', 'pulp', 'torch'}"
    code = f"import sys, moeplan.solvers.netmoe; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


CLUSTERS = [Cluster(1, 3), Cluster(3, 1), Cluster(2, 2)]


def crossing(copies: np.ndarray, home: tuple[int, ...], cluster: Cluster) -> tuple[float, ...]:
    """Copies between nodes, and between devices of a node."""
    return naive_loads(copies, np.arange(cluster.num_devices), np.array(home), cluster)[:2]


def within(home: tuple[int, ...], cluster: Cluster) -> bool:
    return all(home.count(device) <= -(-len(home) // cluster.num_devices) for device in home)


def best(copies: np.ndarray, cluster: Cluster) -> tuple[float, ...]:
    """The fewest copies between nodes, then inside them, of all homes."""
    every = itertools.product(range(cluster.num_devices), repeat=len(copies))
    return min(crossing(copies, home, cluster) for home in every if within(home, cluster))


@settings(max_examples=40)
@given(
    st.sampled_from(CLUSTERS),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from(["sum", "paper"]),
)
def test_sum_and_paper_have_the_fewest_copies_between_nodes_then_the_fewest_inside(
    cluster: Cluster, num_samples: int, seed: int, predicted: bool, method: str
) -> None:
    rng = np.random.default_rng(seed)
    copies, following = rng.integers(0, 9, (2, num_samples, cluster.num_devices))
    found = netmoe.rehome(
        method, copies, copies.sum(axis=1), cluster, next_copies=following.astype(float) if predicted else None
    )
    home = tuple(found.device_of_sample.tolist())
    both = copies + following if predicted else copies
    assert within(home, cluster)
    if 1 < cluster.num_nodes < cluster.num_devices:
        assert crossing(both, home, cluster)[0] == best(both, cluster)[0]
    else:
        assert crossing(both, home, cluster) == best(both, cluster)
    (outcome,) = found.dealt
    far, near = crossing(both, home, cluster)
    assert outcome.objective.value == pytest.approx(inter_ratio(cluster) * far + near)
    assert known(outcome.bound) <= outcome.objective.value * (1 + 1e-9)


@settings(max_examples=30)
@given(st.sampled_from(CLUSTERS), st.integers(1, 17), st.integers(0, 2**32))
def test_even_deals_the_longest_samples_one_a_device_by_rounds(cluster: Cluster, num_samples: int, seed: int) -> None:
    rng, size = np.random.default_rng(seed), cluster.num_devices
    copies, length = rng.integers(0, 9, (num_samples, size)), rng.integers(1, 30, num_samples)
    found = netmoe.rehome("even", copies, length, cluster)
    longest = sorted(range(num_samples), key=lambda i: (-length[i], i))
    for first in range(0, num_samples, size):
        dealt = longest[first : first + size]
        homes = found.device_of_sample[dealt]
        assert len(set(homes.tolist())) == len(dealt)
        alone = netmoe.rehome("sum", copies[dealt], length[dealt], cluster, bounded=False)
        assert np.array_equal(homes, alone.device_of_sample)
    assert len(found.dealt) == -(-num_samples // size)
    assert known(known(found.whole).bound) <= sum(outcome.objective.value for outcome in found.dealt) * (1 + 1e-9)


@pytest.mark.parametrize("method", netmoe.METHODS)
def test_what_is_not_bounded_has_the_same_homes(method: str) -> None:
    named = "busiest_cost" if method == "bottleneck" else "link_cost"
    copies = np.random.default_rng(1).integers(0, 50, (10, 4))
    found = [
        netmoe.rehome(method, copies, copies.sum(axis=1), Cluster(2, 2), bounded=bounded) for bounded in (True, False)
    ]
    assert np.array_equal(found[0].device_of_sample, found[1].device_of_sample)
    assert {outcome.objective.name for outcome in found[0].dealt} == {named}
    assert found[1].whole is None
    assert all(outcome.bound is None for outcome in found[1].dealt)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([(1, 3), (2, 1), (2, 2)]), st.integers(1, 4))
def test_the_weights_of_a_bound_prove_it_over_all_homes(seed: int, nodes: tuple[int, int], num_samples: int) -> None:
    rng, cluster = np.random.default_rng(seed), Cluster(*nodes, LINKS)
    copies = rng.integers(0, 90, (2, num_samples, cluster.num_devices)).astype(float)
    channels, room = Channels.of(cluster, 1000.0), -(-num_samples // cluster.num_devices)
    found = least_time(netmoe.Traffic(*copies), np.full(cluster.num_devices, room), channels)
    assert found.weights.min() >= 0
    np.testing.assert_allclose(found.weights.sum(axis=(1, 2, 3)), 1)
    means, times = [], []
    for home in itertools.product(range(cluster.num_devices), repeat=num_samples):
        if max(map(home.count, home)) <= room:
            seconds = np.array([channels.seconds(x, np.array(home)) for x in copies])
            means.append((found.weights * seconds).sum())
            times.append(seconds.max(axis=(1, 2, 3)).sum())
    assert found.seconds == pytest.approx(min(means), rel=1e-9)
    assert found.seconds <= min(times) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([(1, 3), (2, 2), (3, 1)]), st.integers(1, 8), st.integers(0, 3))
def test_no_homes_have_fewer_copies_and_random_ones_the_blind_number(
    seed: int, nodes: tuple[int, int], num_samples: int, spare: int
) -> None:
    rng, cluster = np.random.default_rng(seed), Cluster(*nodes)
    counts = rng.integers(0, 9, (num_samples, 5)) + rng.integers(0, 20, 5)
    capacity = rng.multinomial(num_samples + spare, np.full(cluster.num_devices, 1 / cluster.num_devices))
    traffic = netmoe.traffic_of(counts, rng.integers(0, cluster.num_devices, 5), cluster, next_counts=counts)
    found = netmoe.locality(traffic, capacity, cluster)
    home = netmoe.two_stages(traffic.units, capacity, cluster.devices_per_node)
    best = netmoe.volumes(traffic.gather, home, cluster)
    copies = best.inter if cluster.num_nodes > 1 else best.intra
    assert found.least <= 2 * copies * (1 + 1e-12)
    assert 0 <= found.share <= 1
    sink = np.repeat(np.arange(cluster.num_devices), capacity)
    dealt = [netmoe.volumes(traffic.gather[[0]], sink[[place]], cluster) for place in range(len(sink))]
    first = np.mean([v.inter if cluster.num_nodes > 1 else v.intra for v in dealt])
    alone = netmoe.locality(netmoe.Traffic(traffic.gather[:1], None), capacity, cluster)
    assert alone.blind == pytest.approx(first)


def test_what_all_samples_have_in_common_is_no_locality() -> None:
    traffic = netmoe.traffic_of(np.tile([90, 5, 3, 2], (8, 1)), [0, 1, 2, 3], Cluster(2, 2))
    assert netmoe.locality(traffic, np.full(4, 2), Cluster(2, 2)).share == pytest.approx(0)


def test_samples_that_keep_to_one_node_are_all_locality() -> None:
    own = np.array(list(itertools.islice(itertools.cycle([[7, 0], [0, 7]]), 8)))
    found = netmoe.locality(netmoe.traffic_of(own, [0, 1], Cluster(2, 1)), np.full(2, 4), Cluster(2, 1))
    assert (found.blind, found.least, found.share) == (28, 0, 1)
    assert netmoe.Locality(blind=0.0, least=0.0).share == 0


def test_a_sample_goes_on_along_the_rows_of_the_transitions() -> None:
    transitions = [[6, 2, 0], [0, 0, 5], [0, 0, 0]]
    expected = [[3, 1, 2], [4 * 6 / 13, 4 * 2 / 13, 4 * 5 / 13]]
    for unit in (1, 1 / 13):
        found = netmoe.predict_next([[4, 2, 0], [0, 0, 4]], unit * np.array(transitions))
        assert found == pytest.approx(np.array(expected))


def test_transitions_of_samples_weigh_each_by_its_copies() -> None:
    found = netmoe.sample_transitions([[2, 0], [1, 3]], [[1, 1], [0, 4]])
    assert found.tolist() == [[1, 2], [0, 3]]
    assert netmoe.sample_transitions([[2, 0]], [[0, 0]]).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("counts", [[[1, 2, 3]], [[-1, 2]], [1, 2], [[np.inf, 1]]])
def test_counts_that_do_not_fit_the_transitions_are_refused(counts: Any) -> None:
    with pytest.raises(ValueError, match="counts"):
        netmoe.predict_next(counts, np.ones((2, 2)))
    with pytest.raises(ValueError, match="counts"):
        netmoe.sample_transitions(counts, np.ones((3, 2)))
