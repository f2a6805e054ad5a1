"""Clusters and links in words: what is read, and one clear line for what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.profilers.cluster import Cluster, Link


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
     "intra=4e999:2", "intra=1e7:2"],
)  # fmt: skip
def test_an_impossible_link_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected (KIND=GBps:us|0 <= latency)") as caught:
        Cluster.parse("2x8", [text])
    assert "\n" not in str(caught.value)
