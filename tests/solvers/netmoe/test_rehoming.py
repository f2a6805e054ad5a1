"""The re-homing of one step after one layer: what each method does, against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import netmoe
from moeplan.solvers.cost import inter_ratio
from moeplan.solvers.netmoe.bottleneck import Channels

FEWEST = st.sampled_from(["sum", "paper"])
CLUSTERS = [Cluster(1, 3), Cluster(3, 1), Cluster(2, 2)]


def crossing(copies: np.ndarray, home: tuple[int, ...], cluster: Cluster) -> tuple[int, int]:
    """Copies between nodes, and between devices of a node, sample by sample."""
    group, far, near = cluster.devices_per_node, 0, 0
    for row, here in zip(copies.tolist(), home, strict=True):
        far += sum(c for d, c in enumerate(row) if d // group != here // group)
        near += sum(c for d, c in enumerate(row) if d // group == here // group and d != here)
    return far, near


def within(home: tuple[int, ...], cluster: Cluster) -> bool:
    return all(home.count(device) <= -(-len(home) // cluster.num_devices) for device in home)


def best(copies: np.ndarray, cluster: Cluster) -> tuple[int, int]:
    """The fewest copies between nodes, then inside them, of all homes."""
    every = itertools.product(range(cluster.num_devices), repeat=len(copies))
    return min(crossing(copies, home, cluster) for home in every if within(home, cluster))


@settings(max_examples=40, deadline=None)
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
    assert outcome.bound is not None
    assert outcome.bound <= outcome.objective.value * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CLUSTERS), st.integers(1, 17), st.integers(0, 2**32))
def test_even_deals_the_longest_samples_one_a_device_round_by_round(
    cluster: Cluster, num_samples: int, seed: int
) -> None:
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
    assert found.whole is not None
    assert found.whole.bound is not None
    assert found.whole.bound <= sum(outcome.objective.value for outcome in found.dealt) * (1 + 1e-9)


def test_bottleneck_is_faster_by_its_ports_than_sum() -> None:
    cluster, rng = Cluster.parse("2x2", ["intra=100:2", "inter=10:5"]), np.random.default_rng(0)
    preferences = rng.dirichlet(np.full(4, 0.5), (2, 24))
    copies, following = rng.poisson(preferences * rng.integers(50, 2000, (24, 1)))
    summed, found = (
        netmoe.rehome(
            method, copies, copies.sum(axis=1), cluster, next_copies=following.astype(float), copy_bytes=512.0
        )
        for method in ("sum", "bottleneck")
    )
    channels = Channels.of(cluster, 512.0)
    traffic = netmoe.traffic_of(copies, np.arange(4), cluster, next_counts=following)
    (outcome,) = found.dealt
    assert outcome.objective.name == "exchange_s"
    assert outcome.objective.value == pytest.approx(channels.total(traffic, found.device_of_sample))
    assert outcome.objective.value < channels.total(traffic, summed.device_of_sample)
    assert outcome.bound is not None
    assert outcome.bound <= outcome.objective.value


@pytest.mark.parametrize("method", netmoe.METHODS)
def test_what_is_not_bounded_has_the_same_homes(method: str) -> None:
    copies = np.random.default_rng(1).integers(0, 50, (10, 4))
    found = [
        netmoe.rehome(method, copies, copies.sum(axis=1), Cluster(2, 2), bounded=bounded) for bounded in (True, False)
    ]
    assert np.array_equal(found[0].device_of_sample, found[1].device_of_sample)
    assert found[1].whole is None
    assert all(outcome.bound is None for outcome in found[1].dealt)
