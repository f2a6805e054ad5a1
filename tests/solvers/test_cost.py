"""Hops, ports and seconds, against counts token by token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.fits.fit import Prediction
from moeplan.solvers.cost import INTER_RATIO, hops_kept, inter_ratio, link_cost, remote_copies
from moeplan.solvers.placement import Placement
from moeplan.solvers.ports import Sharing, combined_at, link_classes, port_copies, remote_visits, sample_copies
from moeplan.solvers.seconds import (
    attention_seconds,
    exchange_seconds,
    expert_seconds,
    gather_seconds,
    slowest,
)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(-1, 4), min_size=3, max_size=3)), max_size=9))
def test_remote_copies_are_the_distinct_devices_other_than_the_origin(tokens: list[tuple[int, list[int]]]) -> None:
    origin = np.array([home for home, _ in tokens], dtype=np.int32)
    devices = np.array([visited for _, visited in tokens], dtype=np.int32).reshape(-1, 3)
    naive = [len({d for d in visited if d >= 0} - {home}) for home, visited in tokens]
    assert remote_copies(devices, origin).tolist() == naive


def test_link_costs_are_nothing_at_home_one_inside_a_node_and_the_ratio_between_nodes() -> None:
    links = {"intra": Link(1e-6, 1e-11), "inter": Link(1e-5, 5e-11)}
    cost = link_cost(Cluster(2, 2, links))
    assert cost == pytest.approx(np.array([[0, 1, 5, 5], [1, 0, 5, 5], [5, 5, 0, 1], [5, 5, 1, 0]]))
    assert inter_ratio(Cluster(2, 2)) == INTER_RATIO
    assert inter_ratio(Cluster(2, 2, {"inter": links["inter"]})) == INTER_RATIO
    assert inter_ratio(Cluster(2, 2, {"intra": links["inter"], "inter": links["intra"]})) == 1


def test_hops_kept_with_replicas_follow_each_token_to_its_nearest_replica() -> None:
    # Four devices on two nodes.
    placement = Placement(np.array([[0, 1, 0, 2], [1, 0, 2, 0], [0, 1, 2, 0]], np.int32), np.ones(4, np.int64), 3)
    weight = np.zeros((2, 3, 3))
    weight[0, 0, 0] = 12  # half from device 0 to 1, half from 2 to 3: nodes kept, devices not
    weight[0, 1, 1] = 8  # from device 1 to 0: node kept
    weight[1, 0, 0] = 12  # on devices 1 and 3 alike, replicas on 0 and 3: half stays, half stays on its node
    weight[1, 2, 2] = 4  # stays on device 2
    kept = hops_kept(weight, placement, 2)
    assert kept.device.tolist() == [0, 6 + 4]
    assert kept.node.tolist() == [20, 12 + 4]


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


CLUSTERS = ["1x4", "2x2", "3x1", "2x3"]


def line(a: float, b: float) -> Any:
    """A monotone curve with an interval; beyond 5,000 it is extrapolated."""

    def curve(n: Any) -> Prediction:
        t = a + b * n
        return Prediction(t, 0.9 * t, 1.2 * t, n > 5000)

    return curve


def plane(first: Any, second: Any) -> Prediction:
    t = 1.0 + 0.5 * first + 0.1 * first * second
    return Prediction(t, 0.8 * t, 1.5 * t, first > 40)


@given(st.integers(0, 2**32), st.sampled_from(CLUSTERS))
def test_an_exchange_waits_for_the_busiest_port_of_the_slowest_class(seed: int, name: str) -> None:
    cluster = Cluster.parse(name)
    curves = [line(3.0, 0.5), line(1.0, 2.0)][: len(link_classes(cluster))]
    rng = np.random.default_rng(seed)
    copies = rng.integers(0, 90, size=(3, 2, len(curves), 2, cluster.num_devices))
    kept = rng.integers(0, 90, size=(3, 2, 1, 1, cluster.num_devices))
    alone = [lambda port, *_, of=curve: of(port) for curve in curves]
    most = [lambda _port, most, _even, of=curve: of(most) for curve in curves]
    found, both = slowest(exchange_seconds(copies, 128.0, alone)), exchange_seconds(copies, 128.0, most, kept)
    for step in range(3):
        for layer in range(2):
            slow = 0.0
            for c, curve in enumerate(curves):
                for direction in (0, 1):
                    for device in range(cluster.num_devices):
                        slow = max(slow, float(curve(128.0 * copies[step, layer, c, direction, device]).seconds))
            assert found.seconds[step, layer] == pytest.approx(slow)
            assert found.low[step, layer] == pytest.approx(0.9 * slow)
            assert found.high[step, layer] == pytest.approx(1.2 * slow)
            for c, curve in enumerate(curves):
                handled = max(  # what a device sends itself crosses no node: it is of the first class alone
                    copies[step, layer, c, direction, device] + (kept[step, layer, 0, 0, device] if c == 0 else 0)
                    for direction in (0, 1)
                    for device in range(cluster.num_devices)
                )
                assert both[c].seconds[step, layer] == pytest.approx(float(curve(128.0 * handled).seconds))


@given(st.integers(0, 2**32), st.sampled_from(["2x2", "2x3", "3x2", "1x4", "4x1"]), st.floats(1, 5))
def test_a_link_that_devices_share_is_as_busy_as_their_node(seed: int, name: str, shared_by: float) -> None:
    """Device by device: a byte takes 1 s beside all others, 1 / f s of a device alone; a node has G / f such ports."""
    alone = min(shared_by, int(name[2])) if name[0] != "1" else 1.0
    cluster = Cluster.parse(name, [f"inter=1:1:{alone}"] if name[0] != "1" else [])
    group, classes = cluster.devices_per_node, len(link_classes(cluster))
    copies = np.random.default_rng(seed).integers(0, 90, size=(2, 3, classes, 2, cluster.num_devices))
    curves = [lambda port, *_: line(0.0, 1.0)(port)] * classes
    found = exchange_seconds(copies, 1.0, curves, shared=Sharing.of(cluster))
    for step, layer in np.ndindex(2, 3):
        near, far = copies[step, layer, 0], copies[step, layer, -1]
        device_s = [n / alone for way in far.tolist() for n in way]
        node_s = [sum(way[at : at + group]) / group for way in far.tolist() for at in range(0, len(way), group)]
        expected_s = max(device_s + node_s) if cluster.num_nodes > 1 else far.max()
        assert found[-1].seconds[step, layer] == pytest.approx(expected_s)
        if classes == 2:
            assert found[0].seconds[step, layer] == near.max()


def test_two_devices_of_a_node_that_send_ten_copies_take_twice_as_long_where_they_share_its_link() -> None:
    """By hand: 10 and 10 of one node against 20 and 0: on ports 10 and 20 s, on one link 10 and 10 s."""
    even, uneven = np.zeros((2, 1, 1, 2, 2, 4))
    even[0, 0, 1, 0] = 10, 10, 0, 0
    uneven[0, 0, 1, 0] = 20, 0, 0, 0
    curves = [lambda port, *_: line(0.0, 1.0)(port)] * 2
    for shared, seconds in ((Sharing(2, 1.0), (10, 20)), (Sharing(2, 2.0), (10, 10)), (Sharing(2, 1.5), (10, 40 / 3))):
        told = [exchange_seconds(one, 1.0, curves, shared=shared)[1].seconds[0, 0] for one in (even, uneven)]
        assert told == pytest.approx(seconds)


def test_a_class_that_nothing_crosses_takes_no_time_and_own_copies_take_some_in_the_first_class_alone() -> None:
    copies, kept = np.zeros((1, 3, 2, 2, 4), np.int64), np.zeros((1, 3, 1, 1, 4), np.int64)
    copies[0, 0, 0, 0, 1], copies[0, 0, 0, 1, 0], kept[0, :2] = 7, 7, 5000
    intra, inter = exchange_seconds(copies, 1.0, [lambda _port, most, _even: line(3.0, 1.0)(most)] * 2, kept)
    assert intra.seconds.tolist() == [[5010, 5003, 0]]
    assert intra.extrapolated.tolist() == [[True, False, False]]
    assert inter.seconds.tolist() == inter.high.tolist() == [[0, 0, 0]]


def test_experts_wait_for_the_busiest_device_of_each_width_and_idle_layers_take_none() -> None:
    pairs = np.array([[[10, 30, 4], [0, 0, 0]]])
    found = expert_seconds(pairs, np.array([2, 2, 5]), plane)
    assert found.seconds[0, 0] == pytest.approx(max(1 + 0.5 * 30 + 0.1 * 60, 1 + 0.5 * 4 + 0.1 * 20))
    assert (found.seconds[0, 1], found.extrapolated[0, 1]) == (0, False)
    slotless = expert_seconds(np.array([[[10, 0]]]), np.array([2, 0]), plane)
    assert slotless.seconds[0, 0] == pytest.approx(1 + 5 + 2)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_attention_is_exact_for_samples_of_any_lengths(lengths: list[int]) -> None:
    """c0 + c1 sum L + c2 sum L^2 and a call for each length, whatever batch of equal samples stands for them."""

    def cost(batch: Any, length: Any, calls: Any) -> Prediction:
        t = 4.0 + 3.0 * calls + 2.0 * batch * length + 0.3 * batch * length**2
        return Prediction(t, t, t, np.zeros(t.shape, bool))

    tokens = np.array([[[1, sum(lengths), 0]]])  # the others have no more
    contexts = np.array([[[1, sum(2 * p + 1 for length in lengths for p in range(length)), 0]]])
    expected = 7.0 + 2.0 * sum(lengths) + 0.3 * sum(length**2 for length in lengths)
    assert attention_seconds(tokens, contexts, cost).seconds[0, 0] == pytest.approx(expected)
    calls = np.array([[[1, len({*lengths}), 0]]])
    expected += 3.0 * (len({*lengths}) - 1)
    assert attention_seconds(tokens, contexts, cost, calls).seconds[0, 0] == pytest.approx(expected)


@given(st.integers(0, 2**32), st.sampled_from(CLUSTERS), st.booleans())
def test_a_gather_sends_every_token_to_every_peer(seed: int, name: str, shared: bool) -> None:
    """Through ports of their own, or through one of a node, which a device alone drives as fast as all of them."""
    cluster = Cluster.parse(name)
    group, numbers = cluster.devices_per_node, range(cluster.num_devices)
    shared = shared and cluster.num_nodes > 1
    if shared:
        cluster = cluster.joined_by({"inter": Link(0.0, 1e-9, shared_by=group)})
    tokens = np.random.default_rng(seed).integers(0, 50, size=(2, 3, cluster.num_devices))
    classes = link_classes(cluster)
    found = gather_seconds(tokens, 4.0, cluster, [line(0.0, 1.0)] * len(classes))
    for link, part in zip(classes, found, strict=True):
        for step, layer in np.ndindex(2, 3):
            held, out, into = tokens[step, layer], list[float](), list[float]()
            for d in numbers:
                peers = [e for e in numbers if e != d and (e // group == d // group) == (link == "intra")]
                out.append(held[d] * len(peers))
                into.append(sum(held[e] for e in peers))
            if shared and link == "inter":
                out, into = ([sum(way[d : d + group]) / group for d in numbers[::group]] for way in (out, into))
            assert part.seconds[step, layer] == pytest.approx(4.0 * max(*out, *into), rel=1e-12)
