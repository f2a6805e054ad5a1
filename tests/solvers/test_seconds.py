"""The closed forms against loops over steps, layers, classes and devices."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fit import Prediction
from moeplan.solvers.ports import link_classes
from moeplan.solvers.seconds import (
    attention_seconds,
    exchange_seconds,
    expert_seconds,
    gather_seconds,
    slowest,
    step_seconds,
    total,
)

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


def random_copies(seed: int, cluster: Cluster) -> Any:
    classes = len(link_classes(cluster))
    return np.random.default_rng(seed).integers(0, 90, size=(3, 2, classes, 2, cluster.num_devices))


@given(st.integers(0, 2**32), st.sampled_from(CLUSTERS))
def test_an_exchange_waits_for_the_busiest_port_of_the_slowest_class(seed: int, name: str) -> None:
    cluster = Cluster.parse(name)
    copies = random_copies(seed, cluster)
    curves = [line(3.0, 0.5), line(1.0, 2.0)][: copies.shape[2]]
    found = slowest(exchange_seconds(copies, 128.0, curves))
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


@given(st.integers(0, 2**32), st.sampled_from(CLUSTERS))
def test_relabelling_the_devices_of_a_node_keeps_every_second(seed: int, name: str) -> None:
    cluster, rng = Cluster.parse(name), np.random.default_rng(seed)
    order = np.concatenate(
        [
            node * cluster.devices_per_node + rng.permutation(cluster.devices_per_node)
            for node in range(cluster.num_nodes)
        ]
    )
    copies, tokens = random_copies(seed, cluster), rng.integers(0, 50, size=(3, 2, cluster.num_devices))
    slots = rng.integers(1, 3, size=cluster.num_devices)
    curves = [line(3.0, 0.5), line(1.0, 2.0)][: copies.shape[2]]
    classes, group = link_classes(cluster), cluster.devices_per_node
    for one, other in (
        (slowest(exchange_seconds(copies, 8.0, curves)), slowest(exchange_seconds(copies[..., order], 8.0, curves))),
        (expert_seconds(tokens, slots, plane), expert_seconds(tokens[..., order], slots[order], plane)),
        (
            attention_seconds(tokens, tokens**2, plane),
            attention_seconds(tokens[..., order], tokens[..., order] ** 2, plane),
        ),
        (
            slowest(gather_seconds(tokens, 4.0, group, classes, curves)),
            slowest(gather_seconds(tokens[..., order], 4.0, group, classes, curves)),
        ),
    ):
        np.testing.assert_allclose(one.seconds, other.seconds)
        np.testing.assert_array_equal(one.extrapolated, other.extrapolated)


@given(st.integers(0, 2**32), st.sampled_from(CLUSTERS), st.integers(1, 1000))
def test_one_more_copy_anywhere_never_takes_less_time(seed: int, name: str, more: int) -> None:
    cluster = Cluster.parse(name)
    copies = random_copies(seed, cluster)
    curves = [line(3.0, 0.5), line(1.0, 2.0)][: copies.shape[2]]
    before = slowest(exchange_seconds(copies, 8.0, curves))
    copies.reshape(-1)[seed % copies.size] += more
    after = slowest(exchange_seconds(copies, 8.0, curves))
    assert (after.seconds >= before.seconds).all()
    assert (after.high >= before.high).all()


def test_experts_wait_for_the_busiest_device_of_each_width_and_idle_layers_take_none() -> None:
    pairs = np.array([[[10, 30, 4], [0, 0, 0]]])
    found = expert_seconds(pairs, np.array([2, 2, 5]), plane)
    assert found.seconds[0, 0] == pytest.approx(max(1 + 0.5 * 30 + 0.1 * 60, 1 + 0.5 * 4 + 0.1 * 20))
    assert found.seconds[0, 1] == 0
    assert not found.extrapolated[0, 1]


def test_a_device_without_slots_computes_nothing() -> None:
    assert expert_seconds(np.array([[[10, 0]]]), np.array([2, 0]), plane).seconds[0, 0] == pytest.approx(1 + 5 + 2)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_attention_is_exact_for_samples_of_any_lengths(lengths: list[int]) -> None:
    """c0 + c1 sum L + c2 sum L^2, whatever batch of equal samples stands for them."""

    def cost(batch: Any, length: Any) -> Prediction:
        t = 7.0 + 2.0 * batch * length + 0.3 * batch * length**2
        return Prediction(t, t, t, np.zeros(t.shape, bool))

    tokens = np.array([[[sum(lengths), 0]]])
    contexts = np.array([[[sum(2 * p + 1 for length in lengths for p in range(length)), 0]]])
    expected = 7.0 + 2.0 * sum(lengths) + 0.3 * sum(length**2 for length in lengths)
    assert attention_seconds(tokens, contexts, cost).seconds[0, 0] == pytest.approx(expected)


@given(st.integers(0, 2**32), st.sampled_from(CLUSTERS))
def test_a_gather_sends_every_token_to_every_peer(seed: int, name: str) -> None:
    cluster = Cluster.parse(name)
    tokens = np.random.default_rng(seed).integers(0, 50, size=(2, 3, cluster.num_devices))
    classes, group = link_classes(cluster), cluster.devices_per_node
    found = gather_seconds(tokens, 4.0, group, classes, [line(0.0, 1.0)] * len(classes))
    for link, part in zip(classes, found, strict=True):
        for step, layer in np.ndindex(2, 3):
            held, busiest = tokens[step, layer], 0
            for d in range(cluster.num_devices):
                peers = [
                    e for e in range(cluster.num_devices) if e != d and (e // group == d // group) == (link == "intra")
                ]
                busiest = max(busiest, held[d] * len(peers), sum(held[e] for e in peers))
            assert part.seconds[step, layer] == 4.0 * busiest


def test_a_step_sums_its_layers_also_where_all_take_the_same() -> None:
    t = np.array([[1.0, 2.0], [3.0, 5.0]])
    parts = Prediction(t, 0.5 * t, 2 * t, t > 4)
    summed = step_seconds(total([parts, parts]), 2)
    assert summed.seconds.tolist() == [6.0, 16.0]
    assert summed.high.tolist() == [12.0, 32.0]
    assert summed.extrapolated.tolist() == [False, True]
    alike = Prediction(t[:, :1], t[:, :1], t[:, :1], t[:, :1] > 4)
    assert step_seconds(alike, 6).seconds.tolist() == [6.0, 18.0]
