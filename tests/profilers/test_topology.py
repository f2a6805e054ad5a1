"""Which ranks are near each other, told from times alone and held against the hosts."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.profilers.topology import Topology, islands, numbered


@given(data=st.data(), count=st.integers(2, 4), each=st.integers(2, 4), ratio=st.floats(3.0, 50.0))
def test_islands_of_any_arrangement_are_found(data: st.DataObject, count: int, each: int, ratio: float) -> None:
    island = data.draw(st.permutations([rank % count for rank in range(count * each)]))
    wobble = st.floats(1.0, 1.19)
    times = {
        (one, two): (1e-5 if island[one] == island[two] else 1e-5 * ratio) * data.draw(wobble)
        for one, two in combinations(range(count * each), 2)
    }
    found, gap = islands([times], count * each)
    assert found == numbered(island)
    assert gap is not None
    assert ratio / 1.2 < gap < ratio * 1.2


@given(st.lists(st.floats(1.0, 1.9), min_size=6, max_size=6))
def test_times_of_one_class_make_one_island(times: list[float]) -> None:
    assert islands([dict(zip(combinations(range(4), 2), times, strict=True))], 4) == ((0, 0, 0, 0), None)


@pytest.mark.parametrize(
    "fast",
    [
        [(0, 1), (1, 2)],  # not transitive
        [(0, 1)],  # islands of 2, 1 and 1
        [(0, 1), (0, 2), (1, 2)],  # of 3 and 1
        [(0, 1), (0, 2), (1, 2), (1, 3), (0, 3)],  # one slow pair
    ],
)
def test_fast_pairs_that_make_no_even_islands_are_noise(fast: list[tuple[int, int]]) -> None:
    times = {pair: 1.0 if pair in fast else 10.0 for pair in combinations(range(4), 2)}
    assert islands([times], 4) == ((0, 0, 0, 0), None)


def test_latency_tells_what_bandwidth_does_not() -> None:
    small = {(one, two): 1.0 if one // 2 == two // 2 else 5.0 for one, two in combinations(range(4), 2)}
    large = dict.fromkeys(small, 100.0)
    assert islands([small, large], 4) == ((0, 0, 1, 1), 5.0)


def test_a_topology_says_whether_times_and_hosts_agree() -> None:
    nodes = Topology(node_of_rank=(0, 0, 1, 1), island_of_rank=(0, 0, 1, 1), ratio=4.0)
    assert nodes.agrees
    assert "4 ranks on 2 nodes" in str(nodes)
    assert "4.0 times apart: 2 islands, which are the nodes" in str(nodes)
    as_fast = Topology(node_of_rank=(0, 0, 1, 1), island_of_rank=(0, 0, 0, 0))
    assert not as_fast.agrees
    assert "one class" in str(as_fast)
    pairs_in_a_node = Topology(node_of_rank=(0,) * 4, island_of_rank=(0, 1, 0, 1), ratio=3.0)
    assert not pairs_in_a_node.agrees
    assert Topology(node_of_rank=(0, 1, 2), island_of_rank=(0, 0, 0)).agrees  # a rank a node: all pairs are alike
    assert Topology(node_of_rank=(0, 0)).agrees
