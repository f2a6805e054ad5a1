"""Clusters and links in words, as text and as cluster.yaml, and which ranks are near each other by their times."""

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from moeplan.errors import InputError, UsageError
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.description import describe
from moeplan.profilers.topology import Topology, islands, numbered
from moeplan.solvers import luffy, netmoe


@given(nodes=st.integers(1, 256), devices=st.integers(1, 256))
def test_a_cluster_reads_what_it_prints(nodes: int, devices: int) -> None:
    cluster = Cluster.parse(f"{nodes}x{devices}")
    assert str(cluster) == f"{nodes}x{devices}"
    assert Cluster.parse(str(cluster)) == cluster
    assert cluster.num_devices == nodes * devices


def test_links_are_read_in_gigabytes_a_second_and_microseconds() -> None:
    cluster = Cluster.parse("2x8", ["intra=400:2", "inter=50:4.5"])
    assert cluster.links["intra"] == Link(latency_s=2e-6, s_per_byte=1e-9 / 400)
    assert cluster.links["inter"].latency_s == pytest.approx(4.5e-6)
    assert Cluster.parse("2x8", ["intra=1e6:2"]).links["intra"].s_per_byte == 1e-15


def test_a_link_that_devices_of_a_node_share_is_read_and_kept_and_others_look_as_before(tmp_path: Path) -> None:
    shared = Cluster.parse("2x8", ["intra=400:2", "inter=50:5:8"])
    assert (shared.links["inter"].shared_by, shared.links["intra"].shared_by) == (8.0, 1.0)
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML.replace("latency_us: 5.5", "latency_us: 5, shared_by: 8"))
    assert describe(str(path)).cluster == shared
    files = TypeAdapter(Cluster)
    assert files.validate_json(files.dump_json(shared)) == shared
    assert files.dump_python(shared)["links"]["inter"]["shared_by"] == 8.0
    assert files.dump_python(Cluster.parse("1x8", ["intra=400:2"]))["links"] == {
        "intra": {"latency_s": 2e-6, "s_per_byte": 1e-9 / 400}
    }
    path.write_text(YAML.replace("latency_us: 2", "latency_us: 2, shared_by: 8"))
    with pytest.raises(InputError, match="intra that devices share"):
        describe(str(path))


def test_a_link_stated_again_is_shared_as_before_unless_it_says_otherwise() -> None:
    known = Cluster.parse("2x8", ["inter=50:5:8"])
    for text, shared_by in (("inter=25:1", 8.0), ("inter=25:1:4", 4.0), ("inter=25:1:1", 1.0)):
        link = known.linked([text]).links["inter"]
        assert link.s_per_byte == pytest.approx(4e-11)
        assert (link.latency_s, link.shared_by) == (1e-6, shared_by)
    assert known.linked(["intra=400:2"]).links["inter"] == known.links["inter"]
    assert Cluster.parse("2x8").linked(["inter=25:1"]).links["inter"].shared_by == 1.0


def test_a_device_alone_is_at_most_as_many_times_as_fast_as_its_node_has_devices(tmp_path: Path) -> None:
    words = "link inter of cluster 2x4, on which a device alone is 8 times as fast; expected at most 4"
    with pytest.raises(UsageError, match=words) as caught:
        describe("2x4", ["inter=50:5:8"])
    assert "\n" not in str(caught.value)
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "num_nodes: 2\ndevices_per_node: 4\nlinks: {inter: {gbytes_per_s: 50, latency_us: 5, shared_by: 8}}"
    )
    with pytest.raises(InputError, match=words):
        describe(str(path))
    assert Cluster.parse("2x4", ["inter=50:5:4"]).links["inter"].shared_by == 4.0


@given(before=st.integers(1, 16), after=st.integers(1, 16), part=st.floats(0, 1), s_per_byte=st.floats(1e-12, 1e-3))
def test_nodes_of_another_size_pass_as_much_and_a_device_alone_is_as_fast_as_before(
    before: int, after: int, part: float, s_per_byte: float
) -> None:
    """Bytes a second of a node, and of a device alone, which beside others has no more than its part of the node's."""
    link = Link(1e-6, s_per_byte, 1 + part * (before - 1))
    known = Cluster(2, before, {"inter": link, "intra": Link(0.0, 1e-12)})
    links = known.links_on(Cluster(4, after))
    node, alone = before / s_per_byte, link.shared_by / s_per_byte
    together = 1 / s_per_byte if link.shared_by == 1 else min(alone, node / after)
    assert 1 / links["inter"].s_per_byte == pytest.approx(together)
    assert links["inter"].shared_by / links["inter"].s_per_byte == pytest.approx(alone)
    assert (links["inter"].latency_s, links["intra"]) == (1e-6, known.links["intra"])
    assert Cluster(4, after, links).links == links
    assert before != after or links == known.links


def test_what_four_of_four_devices_share_gives_each_of_two_twice_as_much() -> None:
    known = Cluster.parse("2x4", ["inter=10:5:4"])
    assert known.links_on(Cluster(4, 2)) == Cluster.parse("4x2", ["inter=20:5:2"]).links
    assert known.links_on(Cluster(8, 1)) == Cluster.parse("8x1", ["inter=40:5"]).links


@pytest.mark.parametrize(
    "text",
    ["", "8", "2*8", "x8", "2x", "0x8", "8x0", "-1x8", "2x8x2", "2.0x8", " 2x8", "2x8\n", "9999999x1", "999999x999999",
     "65537x1", "twoxeight", "٢x٨", "1e3x1"],
)  # fmt: skip
def test_an_impossible_cluster_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match="expected NxG") as caught:
        Cluster.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "intra", "intra=400", "intra=400:", "intra=:2", "up=400:2", "intra=0:2", "intra=nan:2", "intra=inf:2",
     "intra=-4:2", "intra=400:-2", "intra=1e-30:2", "intra=400:1e30", "intra=1.2.3:4", "intra=400:2:3", "INTRA=400:2",
     "intra=4e999:2", "intra=1e7:2", "inter=50:5:0.5", "inter=50:5:", "inter=50:5:8:1", "inter=50:5:1e6"],
)  # fmt: skip
def test_an_impossible_link_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected (KIND=GBps:us|0 <= latency)") as caught:
        Cluster.parse("2x8", [text])
    assert "\n" not in str(caught.value)


YAML = """
num_nodes: 2
devices_per_node: 8
links:
  intra: {gbytes_per_s: 400, latency_us: 2}
  inter: {gbytes_per_s: 50, latency_us: 5.5}
"""


def test_a_described_profile_says_that_nothing_was_measured() -> None:
    profile = describe("2x8", ["intra=400:2", "inter=50:5"])
    assert [origin.kind for origin in profile.origins] == ["described"]
    assert (profile.environment, profile.series) == (None, {})
    assert profile.cluster == Cluster.parse("2x8", ["intra=400:2", "inter=50:5"])


@pytest.mark.parametrize("number", ["4e2", "4E+2", "400", ".4e3", "4.0e+2", "+4e2"])
def test_a_yaml_number_may_be_written_with_an_exponent_as_on_the_command_line(tmp_path: Path, number: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML.replace("gbytes_per_s: 400", f"gbytes_per_s: {number}"))
    assert describe(str(path)).cluster.links["intra"] == Link(2e-6, 1e-9 / 400)
    path.write_text(YAML.replace("gbytes_per_s: 400", "gbytes_per_s: 4e"))
    with pytest.raises(InputError, match="gbytes_per_s"):
        describe(str(path))


def test_one_node_in_a_yaml_file_has_no_link_between_nodes_as_on_the_command_line(tmp_path: Path) -> None:
    words, path = "link inter of cluster 1x8; expected two or more nodes", tmp_path / "cluster.yaml"
    path.write_text(YAML.replace("num_nodes: 2", "num_nodes: 1"))
    with pytest.raises(InputError, match=words):
        describe(str(path))
    with pytest.raises(UsageError, match=words):
        describe("1x8", ["inter=50:5"])


def test_a_yaml_file_says_the_same_as_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML)
    assert describe(str(path)).cluster == describe("2x8", ["intra=400:2", "inter=50:5.5"]).cluster
    assert describe(str(path), ["inter=25:1"]).cluster.links == {
        "intra": Link.parse("intra=400:2")[1],
        "inter": Link.parse("inter=25:1")[1],
    }


@pytest.mark.parametrize(
    ("cluster", "links", "told"),
    [
        ("2x8", ["intra=1:1", "intra=2:1"], "two links intra"),
        ("1x4", ["inter=1:1"], "link inter of cluster 1x4; expected two or more nodes"),
    ],
)
def test_a_link_twice_or_between_one_node_is_refused(tmp_path: Path, cluster: str, links: list[str], told: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("num_nodes: {}\ndevices_per_node: {}\n".format(*cluster.split("x")))
    for described in (cluster, str(path)):
        with pytest.raises(UsageError, match=told):
            describe(described, links)


FILES = {
    "empty": "",
    "binary": "\x00\x01\x02",
    "a list": "- 1\n- 2",
    "a word": "cluster",
    "unclosed": "num_nodes: [1",
    "tabs": "num_nodes:\t1\n\tdevices_per_node: 2",
    "no devices": "num_nodes: 2",
    "an extra key": YAML + "racks: 3",
    "a key twice": YAML + "num_nodes: 3",
    "a link twice": "num_nodes: 1\ndevices_per_node: 1\nlinks: {intra: {gbytes_per_s: 1, latency_us: 1}, intra: {}}",
    "zero nodes": "num_nodes: 0\ndevices_per_node: 8",
    "absurd": "num_nodes: 99999999999999999999\ndevices_per_node: 8",
    "half a node": "num_nodes: 0.5\ndevices_per_node: 8",
    "yes nodes": "num_nodes: yes\ndevices_per_node: 8",
    "text": "num_nodes: '2'\ndevices_per_node: 8",
    "NaN": YAML.replace("400", ".nan"),
    "infinite": YAML.replace("400", ".inf"),
    "no bandwidth": YAML.replace("400", "0"),
    "negative latency": YAML.replace("5.5", "-5"),
    "an unknown link": YAML.replace("inter", "outer"),
    "an unhashable key": "? [num_nodes]\n: 2",
    "python": "!!python/object/apply:os.system ['false']",
    "deep": "[" * 20_000,
    "recursive": "num_nodes: &a [*a]\ndevices_per_node: 1",
    "laughs": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "two documents": "---\nnum_nodes: 1\n---\nnum_nodes: 2",
    "a date": "2020-13-45",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_describes_no_cluster_is_one_clear_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILES[name])
    with pytest.raises(InputError) as caught:
        describe(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable(), message
    assert len(message) - len(str(path)) < 300


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


@pytest.mark.parametrize("shared_by", [1.0, 2.0, 8.0])
def test_a_part_of_a_cluster_keeps_its_links_and_samples_are_rehomed_on_it(shared_by: float) -> None:
    cluster = Cluster(4, 8, {"inter": Link(5e-6, 1e-9, shared_by)})
    small = cluster.at_most(3, 3)
    assert (small.num_nodes, small.devices_per_node) == (3, 3)
    link = small.links["inter"]
    assert 1 <= link.shared_by <= 3
    assert link.shared_by / link.s_per_byte == pytest.approx(shared_by * 1e9)  # of a device alone
    assert cluster.at_most(9, 9) == cluster
    assert netmoe.compile_rehoming("sum", cluster) >= 0
    assert luffy.compile_rehoming(cluster) >= 0


def test_links_given_are_those_that_nodes_of_this_size_would_not_have_by_the_profile() -> None:
    measured = Cluster.parse("2x4", ["intra=400:2", "inter=10:9:4"])
    for name, links, theirs in (
        ("2x4", ["intra=400:2", "inter=10:9:4"], []),
        ("4x2", ["intra=400:2", "inter=20:9:2"], []),  # as many bytes a node, by half the devices
        ("4x2", ["intra=400:2", "inter=10:9:2"], ["inter"]),
        ("2x4", ["intra=300:2", "inter=10:9"], ["inter", "intra"]),
        ("2x4", ["intra=400:2"], []),
    ):
        assert Cluster.parse(name, links).given_beside(measured) == theirs
    assert Cluster.parse("1x4", ["intra=400:2"]).given_beside(Cluster.parse("1x4")) == ["intra"]
