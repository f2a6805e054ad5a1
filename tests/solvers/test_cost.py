import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.profilers.cluster import Cluster, Link
from moeplan.solvers.cost import INTER_RATIO, hops_kept, inter_ratio, link_cost, remote_copies
from moeplan.solvers.placement import Placement


@settings(deadline=None, max_examples=60)
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


def test_hops_kept_without_replicas_are_counted_exactly(rng: np.random.Generator) -> None:
    weight = rng.integers(0, 50, (2, 6, 6)).astype(float)
    homes = np.array([rng.permutation([0, 0, 1, 1, 2, 3]) for _ in range(3)])
    sets = [[np.flatnonzero(home == d).tolist() for d in range(4)] for home in homes]
    kept = hops_kept(weight, Placement.from_sets(sets, 6), 2)
    for cut in range(2):
        pairs = [(a, b) for a in range(6) for b in range(6)]
        same = [weight[cut, a, b] for a, b in pairs if homes[cut, a] == homes[cut + 1, b]]
        near = [weight[cut, a, b] for a, b in pairs if homes[cut, a] // 2 == homes[cut + 1, b] // 2]
        assert (kept.device[cut], kept.node[cut]) == (sum(same), sum(near))


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


def test_hops_kept_with_replicas_match_a_simulation_of_random_walks(rng: np.random.Generator) -> None:
    num_tokens = 60_000
    layers = [[[0, 1, 4], [1, 2, 3], [0, 2, 4]], [[0, 1, 2], [2, 3, 4], [0, 1, 3]], [[1, 2, 3], [0, 1, 4], [2, 3, 4]]]
    placement = Placement.from_sets(layers, 5)
    chance = rng.dirichlet(np.ones(5), (2, 5))
    expert, device = rng.integers(0, 5, num_tokens), rng.integers(0, 3, num_tokens)
    weight, stayed = np.zeros((2, 5, 5)), np.zeros(2)
    for layer in range(3):
        held = placement.holds(layer)
        anywhere = (rng.random((num_tokens, 3)) * held[expert]).argmax(axis=1)
        here, device = device, np.where(held[expert, device], device, anywhere)
        if layer:
            stayed[layer - 1] = (device == here).mean()
        if layer < 2:
            following = (rng.random(num_tokens)[:, None] > chance[layer, expert].cumsum(axis=1)).sum(axis=1).clip(0, 4)
            np.add.at(weight[layer], (expert, following), 1 / num_tokens)
            expert = following
    assert hops_kept(weight, placement, 3).device == pytest.approx(stayed, abs=0.01)
