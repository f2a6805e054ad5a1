import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers import netmoe
from moeplan.solvers.netmoe.bottleneck import Channels
from moeplan.solvers.netmoe.port_bound import least_time
from moeplan.solvers.netmoe.swaps import swap

LINKS = dict(map(Link.parse, ["intra=400:2", "inter=50:9"]))


@settings(deadline=None, max_examples=60)
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


@settings(deadline=None, max_examples=30)
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
