"""What one step moves, after one layer: its re-homing by every method, its locality, its prediction."""

import itertools
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
from moeplan.solvers.netmoe.swaps import swap
from tests.builders import known
from tests.solvers.builders import naive_loads

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


LINKS = dict(map(Link.parse, ["intra=400:2", "inter=50:9"]))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([(1, 4), (2, 2), (3, 2), (4, 1)]), st.integers(1, 12), st.integers(1, 2))
def test_the_time_of_swaps_is_that_of_its_homes_and_the_devices_keep_their_numbers(
    seed: int, nodes: tuple[int, int], num_samples: int, num_exchanges: int
) -> None:
    rng, cluster = np.random.default_rng(seed), Cluster(*nodes, LINKS)
    copies = rng.integers(0, 90, (num_exchanges, num_samples, cluster.num_devices)).astype(float)
    traffic = netmoe.Traffic(copies[0], copies[1] if num_exchanges == 2 else None)
    channels = Channels.of(cluster, float(rng.choice([1.0, 1e6])))
    before = rng.integers(0, cluster.num_devices, num_samples)
    after = before.copy()
    time = swap(copies, after, num_samples, cluster.devices_per_node, channels.alpha, channels.beta)
    assert time == pytest.approx(channels.total(traffic, after), rel=1e-9)
    assert time <= channels.total(traffic, before) * (1 + 1e-9)
    assert sorted(after) == sorted(before)


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
    assert netmoe.predict_next([[4, 2, 0], [0, 0, 4]], transitions) == pytest.approx(np.array(expected))


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
