"""Ports counted token by token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster
from moeplan.solvers.ports import combined_at, link_classes, port_copies, remote_visits, sample_copies


def naive(device_TK: Any, end_T: Any, step_T: Any, num_steps: int, cluster: Cluster) -> Any:
    classes, group = link_classes(cluster), cluster.devices_per_node
    ports = np.zeros((num_steps, len(classes), 2, cluster.num_devices), int)
    for devices, end, step in zip(device_TK.tolist(), end_T.tolist(), step_T.tolist(), strict=True):
        for device in set(devices) - {-1, end}:
            if step >= 0:
                link = classes.index("intra" if device // group == end // group else "inter")
                ports[step, link, 0, end] += 1
                ports[step, link, 1, device] += 1
    return ports


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["1x3", "2x2", "3x1", "2x3"]), st.integers(1, 3))
def test_ports_are_the_distinct_remote_devices_of_every_token(seed: int, name: str, top_k: int) -> None:
    cluster, rng = Cluster.parse(name), np.random.default_rng(seed)
    device_TK = rng.integers(-1, cluster.num_devices, size=(30, top_k)).astype(np.int32)
    end_T, step_T = rng.integers(cluster.num_devices, size=30), rng.integers(-1, 4, size=30)
    found = port_copies(remote_visits(device_TK, end_T), device_TK, end_T, step_T, num_steps=4, cluster=cluster)
    np.testing.assert_array_equal(found, naive(device_TK, end_T, step_T, 4, cluster))


def test_the_dispatch_models_differ_in_where_a_combine_ends() -> None:
    here, devices = np.array([0, 1, 2, 3]), np.array([[1, 0], [-1, 3], [-1, -1], [0, 1]])
    assert combined_at("standard", here, devices).tolist() == [0, 1, 2, 3]
    assert combined_at("coherent", here, devices).tolist() == [1, 3, 2, 0]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(["1x3", "2x2", "3x1", "2x3", "1x1"]))
def test_ports_of_whole_samples_are_those_of_their_tokens(seed: int, name: str) -> None:
    cluster, rng = Cluster.parse(name), np.random.default_rng(seed)
    sample_T = rng.integers(6, size=40)
    device_TK = rng.integers(-1, cluster.num_devices, size=(40, 2)).astype(np.int32)
    home_I, step_I = rng.integers(cluster.num_devices, size=6), np.array([0, 0, 1, 1, 1, 2])
    copies_ID = np.zeros((6, cluster.num_devices), np.int32)
    for sample, devices in zip(sample_T.tolist(), device_TK.tolist(), strict=True):
        copies_ID[sample, sorted(set(devices) - {-1})] += 1
    found = sample_copies(copies_ID, home_I, cluster, [0, 2, 5])
    classes = [("intra", "inter").index(link) for link in link_classes(cluster)]
    np.testing.assert_array_equal(found[:, classes], naive(device_TK, home_I[sample_T], step_I[sample_T], 3, cluster))
    assert found.sum() == found[:, classes].sum()
    assert found.dtype == np.int64
    shares = sample_copies(copies_ID / 4, home_I, cluster)
    np.testing.assert_allclose(shares[0] * 4, found.sum(axis=0))


@pytest.mark.parametrize(
    ("name", "classes"), [("1x4", ("intra",)), ("4x1", ("inter",)), ("2x2", ("intra", "inter")), ("1x1", ())]
)
def test_a_cluster_has_the_link_classes_that_its_devices_cross(name: str, classes: tuple[str, ...]) -> None:
    assert link_classes(Cluster.parse(name)) == classes
