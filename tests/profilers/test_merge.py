"""Profiles made into one: each part with its origin, contradictions named."""

from dataclasses import replace
from pathlib import Path

import pytest

from moeplan.errors import InputError, MismatchError, UsageError
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import FASTEST, Cluster, Link
from moeplan.profilers.description import describe
from moeplan.profilers.fits.fitting import fit_series
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.merge import merge, merge_files
from moeplan.profilers.profile import load, save
from moeplan.profilers.topology import measured_links
from tests.builders import measured_profile, series

NAMES = ("a.json", "b.json")


NODE = measured_profile(Cluster(1, 8, {"intra": Link(1e-6, 1e-11)}), series("all_to_all", 8, "intra"))


def test_a_node_and_an_inter_node_figure_make_a_cluster_that_says_what_is_from_where() -> None:
    net = describe("4x8", ["intra=1:1", "inter=50:5"])
    for first, second, node in ((NODE, net, 0), (net, NODE, 1)):
        names = NAMES if node == 0 else NAMES[::-1]
        merged = merge(first, second, names=names)
        found = merged.profile
        assert str(found.cluster) == "4x8"
        assert found.cluster.links == {"intra": Link(1e-6, 1e-11), "inter": Link.parse("inter=50:5")[1]}
        assert found.link_origins == {"intra": node, "inter": 1 - node}
        assert [origin.name for origin in found.origins][:: 1 if node == 0 else -1] == ["a.json", "4x8 (b.json)"]
        assert {one.origin for one in found.series.values()} == {node}
        assert any("link intra: taken from a.json, not b.json" in note for note in merged.notes)


def test_a_profile_of_one_rank_a_node_says_nothing_of_the_node() -> None:
    between = measured_profile(Cluster(4, 1, {"inter": Link(5e-6, 2e-11)}), series("point_to_point", 2, "inter"))
    merged = merge(NODE, between, names=NAMES)
    assert str(merged.profile.cluster) == "4x8"
    assert merged.profile.link_origins == {"intra": 0, "inter": 1}
    assert merged.profile.series["point_to_point/uint8@2/inter"].origin == 1


def test_of_a_series_that_both_have_the_first_is_kept_and_it_is_said() -> None:
    slower = measured_profile(
        Cluster(1, 8), series("all_to_all", 8, "intra", b_s=1e-8), series("all_gather", 8, "intra")
    )
    merged = merge(NODE, slower, names=NAMES)
    assert merged.profile.series["all_to_all/uint8@8/intra"] == NODE.series["all_to_all/uint8@8/intra"]
    assert merged.profile.series["all_gather/uint8@8/intra"].origin == 1
    assert merged.notes[-1] == "both have the series all_to_all/uint8@8/intra: taken from a.json"


def test_two_that_say_the_same_of_the_cluster_agree() -> None:
    assert merge(NODE, NODE, names=NAMES).notes[0] == "cluster 1x8: a.json and b.json agree"
    assert merge(NODE, describe("2x8"), names=NAMES).notes[0] == "cluster 2x8: a.json says 1x8, b.json 2x8"


def test_series_stand_in_the_order_of_the_cases_after_a_merge_and_after_a_file(tmp_path: Path) -> None:
    pairs = measured_profile(Cluster(1, 8), series("point_to_point", 2, "intra"), series("all_reduce", 8, "intra"))
    merged = merge(pairs, NODE, names=NAMES).profile
    save(merged, tmp_path / "all.json")
    for profile in (merged, load(tmp_path / "all.json")):
        assert [one.case for one in profile.series.values()] == ["all_to_all", "all_reduce", "point_to_point"]


def test_three_files_merge_and_survive_their_file(tmp_path: Path) -> None:
    more = measured_profile(Cluster(1, 8), series("all_reduce", 8, "intra").model_copy(update={"dtype": "uint8"}))
    paths = [tmp_path / name for name in ("node.json", "net.json", "more.json")]
    for profile, path in zip((NODE, describe("2x8", ["inter=50:5"]), more), paths, strict=True):
        save(profile, path)
    merged = merge_files(paths).profile
    assert [origin.name for origin in merged.origins] == [str(paths[0]), f"2x8 ({paths[1]})", str(paths[2])]
    assert merged.series["all_reduce/uint8@8/intra"].origin == 2
    save(merged, tmp_path / "all.json")
    assert load(tmp_path / "all.json") == merged


def test_contradictions_are_named() -> None:
    cases = [
        (describe("2x4", ["inter=50:5"]), "a.json has 8 devices a node, b.json 4"),
        (measured_profile(Cluster(2, 8), device="CPU"), "a.json was measured on GPU, b.json on CPU"),
    ]
    for other, message in cases:
        with pytest.raises(MismatchError, match=message):
            merge(NODE, other, names=NAMES)
    with pytest.raises(MismatchError, match=r"a\.json has 4 nodes, b\.json 2"):
        merge(describe("4x8"), describe("2x8"), names=NAMES)


def test_too_few_profiles_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    save(NODE, tmp_path / "node.json")
    with pytest.raises(UsageError, match="1 profiles to merge; expected two or more"):
        merge_files([tmp_path / "node.json"])
    (tmp_path / "net.json").write_text("{}")
    with pytest.raises(InputError, match=r"net\.json"):
        merge_files([tmp_path / "node.json", tmp_path / "net.json"])


def test_links_come_from_the_all_to_all_and_else_from_pairs() -> None:
    exchange, pairs = series("all_to_all", 4, "intra"), series("point_to_point", 2, "intra", b_s=5e-10)
    both = {one.key: one for one in (pairs, exchange)}
    assert measured_links(Cluster(1, 4), both)["intra"].s_per_byte == pytest.approx(1e-9)
    assert measured_links(Cluster(1, 4), {pairs.key: pairs})["intra"].s_per_byte == pytest.approx(5e-10)
    assert measured_links(Cluster(1, 4), {}) == {}


def test_the_all_to_all_of_some_ranks_is_not_the_link_of_all() -> None:
    found = [series("all_to_all", ranks, "intra", b_s=s) for ranks, s in ((2, 1e-8), (8, 1e-9))]
    assert measured_links(Cluster(1, 8), {one.key: one for one in found})["intra"].s_per_byte == pytest.approx(1e-9)


def test_between_nodes_a_byte_that_crosses_costs_what_all_bytes_took() -> None:
    found = series("all_to_all", 8, "inter", b_s=2e-10)
    links = measured_links(Cluster(2, 4), {found.key: found})
    assert set(links) == {"inter"}
    block = 1_000_000
    crossing = links["inter"].latency_s + links["inter"].s_per_byte * 4 * block
    assert found.fit is not None
    assert crossing == pytest.approx(found.fit.alpha_beta.a_s + found.fit.alpha_beta.b_s * 7 * block)


def test_a_time_that_does_not_grow_with_size_tells_of_no_bandwidth() -> None:
    flat = series("all_to_all", 4, "intra", b_s=0.0)
    falling = [Measurement.of(one.size, one.work, [1.0 / (index + 1)]) for index, one in enumerate(flat.measurements)]
    fit = fit_series(CASES["all_to_all"], 4, falling)
    assert measured_links(Cluster(1, 4), {flat.key: flat.model_copy(update={"fit": fit})}) == {}


def test_a_time_that_grows_by_less_than_any_hardwares_is_that_of_the_fastest_link() -> None:
    barely = series("all_to_all", 4, "intra")
    assert barely.fit is not None
    line = replace(barely.fit.alpha_beta, b_s=1e-20)
    fit = replace(barely.fit, alpha_beta=line)
    found = measured_links(Cluster(1, 4), {barely.key: barely.model_copy(update={"fit": fit})})
    assert found["intra"].s_per_byte == FASTEST
