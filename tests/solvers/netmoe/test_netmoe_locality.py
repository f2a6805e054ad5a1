import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import netmoe


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([(1, 3), (2, 2), (3, 1)]), st.integers(1, 8), st.integers(0, 3))
def test_no_homes_have_fewer_copies_and_random_ones_have_the_blind_number_on_average(
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
