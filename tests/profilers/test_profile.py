"""The Profile's JSON, and profiles made into one: round trips, and one clear line for what is none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, MismatchError
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import FASTEST, Cluster, Link
from moeplan.profilers.description import describe
from moeplan.profilers.fits.fitting import fit_series
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.merge import merge, merge_files
from moeplan.profilers.origin import Environment, Noise, Origin, now
from moeplan.profilers.profile import Profile, load, parse, save
from moeplan.profilers.series import Series
from moeplan.profilers.topology import Topology, measured_links
from tests.builders import known, measured_profile, series

SECONDS = st.floats(1e-9, 1e4)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
MEASUREMENTS = st.builds(
    Measurement.of,
    st.fixed_dictionaries({"bytes": st.integers(0, 2**63 - 1)}),
    st.integers(1, 2**62),
    st.lists(SECONDS, min_size=1, max_size=8),
)


LINKS = st.dictionaries(
    st.sampled_from(["intra", "inter"]), st.builds(Link, st.floats(0, 3599), st.floats(1e-15, 0.9)), max_size=2
)
CLUSTERS = st.builds(Cluster, st.integers(1, 256), st.integers(1, 256), LINKS)
ENVIRONMENTS = st.builds(
    Environment,
    **dict.fromkeys(("device", "backend", "torch", "cpu", "python", "system"), NAMES),
    **dict.fromkeys(("driver", "nccl"), st.none() | NAMES),
    **dict.fromkeys(("cpus", "threads", "num_ranks", "num_hosts"), st.integers(1, 512)),
)
SERIES = st.builds(
    series,
    st.sampled_from(["all_to_all", "all_reduce"]),
    st.integers(2, 512),
    st.sampled_from([None, "intra", "inter"]),
    dtype=NAMES,
    a_s=st.floats(1e-6, 1),
    b_s=st.floats(1e-12, 1e-8),
)
TOPOLOGIES = st.none() | st.sampled_from(
    [
        Topology(node_of_rank=(0,)),
        Topology(node_of_rank=(0, 0, 1, 1), island_of_rank=(0, 1, 0, 1), ratio=2.5),
        Topology(node_of_rank=(0, 0, 0), island_of_rank=(0, 0, 0)),
    ]
)
NOISES = st.none() | st.builds(Noise.of, st.lists(MEASUREMENTS, max_size=3), st.lists(SECONDS, max_size=3))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Measured and described profiles."""
    cluster = draw(CLUSTERS)
    if draw(st.booleans()):
        origin, series = Origin(kind="described", created_at=now(), name=draw(NAMES)), []
    else:
        origin = Origin(
            kind="measured",
            created_at=now(),
            environment=draw(ENVIRONMENTS),
            quick=draw(st.booleans()),
            topology=draw(TOPOLOGIES),
            noise=draw(NOISES),
        )
        series = draw(st.lists(SERIES | SERIES.map(lambda one: one.model_copy(update={"fit": None})), max_size=2))
    return Profile.of(origin, cluster, series, complete=draw(st.booleans()))


@settings(max_examples=40)
@given(profile=profiles())
def test_a_profile_is_what_its_json_says(profile: Profile) -> None:
    assert parse(json.loads(json.dumps(profile.model_dump(mode="json"))), "profile.json") == profile


KEY = "all_to_all/uint8@2/intra"


@pytest.fixture
def profile() -> Profile:
    measurement = Measurement.of({"bytes": 8}, 8, [1.0, 3.0, 2.0])
    one = series("all_to_all", 2, "intra").model_copy(update={"measurements": (measurement,)})
    topology, noise = Topology(node_of_rank=(0, 0)), Noise(sizes=1, wide=1, reference_s=(1e-3,))
    return measured_profile(Cluster(1, 2, {"intra": Link(1e-5, 1e-9)}), one, topology=topology, noise=noise)


MISSING = object()
SAMPLE = dict.fromkeys(("min_s", "median_s", "p95_s", "max_s", "median_low_s", "median_high_s"), 1e-300)
SHAPE = ("batch", "length", "hidden")
CURVE = {"kind": "piecewise", "works": [1.0, 2.0], "seconds_at": [1.0, 1.7e308]}
LAW = {"kind": "attention", "start_s": 0.0, "projection_s": 0.0, "score_s": 1e308}
PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "": lambda value: value,
    "cluster": lambda value: value["cluster"],
    "intra": lambda value: value["cluster"]["links"]["intra"],
    "origin": lambda value: value["origins"][0],
    "environment": lambda value: value["origins"][0]["environment"],
    "topology": lambda value: value["origins"][0]["topology"],
    "noise": lambda value: value["origins"][0]["noise"],
    "all series": lambda value: value["series"],
    "series": lambda value: value["series"][KEY],
    "measurement": lambda value: value["series"][KEY]["measurements"][0],
    "samples_s": lambda value: value["series"][KEY]["measurements"][0]["samples_s"],
    "size": lambda value: value["series"][KEY]["measurements"][0]["size"],
    "fit": lambda value: value["series"][KEY]["fit"],
    "line": lambda value: value["series"][KEY]["fit"]["alpha_beta"],
    "held out": lambda value: value["series"][KEY]["fit"]["held_out"]["alpha_beta"],
    "measured": lambda value: value["series"][KEY]["fit"]["measured"],
}
VALUES: list[tuple[str, Any, tuple[Any, ...]]] = [  # a place, a key there, and values that it does not hold
    ("", "schema_version", (MISSING, 3, [1] * 10_000, "1")),
    ("", "cluster", (MISSING, "1x2")),
    ("", "series", ([],)),
    ("", "comment", ("hello",)),
    ("", "a\nb\x1b[31m" * 99, (1,)),
    ("", "link_origins", ({}, {"intra": 3})),
    ("", "origins", ([],)),
    ("", "created_at", ("yesterday",)),
    ("measurement", "note", (1,)),
    ("cluster", "racks", (1,)),
    ("cluster", "num_nodes", (0, 10**30, 1.5, "1")),
    ("cluster", "links", ({"up": {"latency_s": 1e-6, "s_per_byte": 1e-9}},)),
    ("intra", "latency_s", (-1e-6,)),
    ("intra", "s_per_byte", (0,)),
    ("samples_s", 0, (-1.0, 0, 1e300, "1.0")),
    ("measurement", "samples_s", ([], [[1.0, 2.0, 3.0]], [1.0] * 20_000)),
    ("measurement", "median_s", (1.5,)),
    ("measurement", "median_low_s", (1.5,)),
    ("measurement", "size", ({}, {"m": 8})),
    ("measurement", "work", (0, True, 10**400)),
    ("size", "bytes", (-8, 10**400)),
    ("series", "unit", ("miles",)),
    ("series", "origin", (1,)),
    ("series", "case", ("\x1b[2J",)),
    ("line", "a_s", (1e308,)),
    ("line", "b_s", (-1e-9, 1e308, 5e-324)),
    ("fit", "model", ({"kind": "oracle"}, CURVE)),
    ("fit", "axes", (["bytes", "bytes"],)),
    ("held out", "median_error", (9.0,)),
    ("measured", "bytes", ([0, 10**400], [-1, 8])),
    ("origin", "environment", (None,)),
    ("origin", "kind", ("described",)),
    ("environment", "device", ("\x1b]0;owned\x07",)),
    ("environment", "cpu", ("\ud800",)),
    ("topology", "node_of_rank", ([1, 0],)),
    ("topology", "island_of_rank", ([0, 0, 0], [0, 1])),
    ("noise", "wide", (2,)),
    ("noise", "reference_s", ([0.0],)),
]
Edit = Callable[[dict[str, Any]], object]
EDITS: dict[str, Edit] = {
    "a plan": lambda v: v.update(decisions=v.pop("series")),
    "a series under another key": lambda v: v["series"].update(gemm=v["series"][KEY]),
    "a sample below any clock": lambda v: PLACES["measurement"](v).update(SAMPLE, samples_s=[1e-300]),
    "a size measured twice": lambda v: v["series"][KEY]["measurements"].append(PLACES["measurement"](v)),
    "a size of other axes": lambda v: v["series"][KEY]["measurements"].append(
        PLACES["measurement"](v) | {"size": {"m": 8}}
    ),
    "a held-out size of 400 digits": lambda v: PLACES["held out"](v)["sizes"].__setitem__(0, [10**400]),
    "100,000 axes": lambda v: PLACES["fit"](v).update(
        axes=[*map(str, range(10**5))], measured={str(n): [1, 2] for n in range(10**5)}
    ),
    "a law beyond a day": lambda v: PLACES["series"](v).update(
        fit=PLACES["fit"](v) | {"axes": SHAPE, "measured": dict.fromkeys(SHAPE, (1, 2)), "model": LAW}, measurements=[]
    ),
    "a topology of a description": lambda v: v["origins"][0].update(kind="described", environment=None),
}


def changed(place: str, key: Any, value: Any) -> Edit:
    """Set one value, or take it away."""

    def change(profile: dict[str, Any]) -> None:
        PLACES[place](profile)[key] = value
        if value is MISSING:
            del PLACES[place](profile)[key]

    return change


EDITS |= {f"{place} {key} {str(v)[:9]}": changed(place, key, v) for place, key, values in VALUES for v in values}


def refused(path: Path, content: str) -> None:
    """What the file holds is refused in one clear line that begins with its name."""
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable(), message
    assert len(message) - len(str(path)) < 300, message


@pytest.mark.parametrize("name", EDITS)
def test_a_profile_of_what_no_measurement_gives_is_refused(profile: Profile, tmp_path: Path, name: str) -> None:
    value = profile.model_dump(mode="json")
    EDITS[name](value)
    refused(tmp_path / "profile.json", json.dumps(value))


@pytest.mark.parametrize("text", ["[]", "null", "7", '{"schema_version": 1, "complete": NaN}', '{"schema_version": 2'])
def test_a_file_that_holds_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    refused(tmp_path / "profile.json", text)


PAIR = ("a.json", "b.json")
NODE = measured_profile(Cluster(1, 8, {"intra": Link(1e-6, 1e-11)}), series("all_to_all", 8, "intra"))


def test_a_node_and_an_inter_node_figure_make_a_cluster_that_says_what_is_from_where() -> None:
    net = describe("4x8", ["intra=1:1", "inter=50:5"])
    for first, second, node in ((NODE, net, 0), (net, NODE, 1)):
        names = PAIR if node == 0 else PAIR[::-1]
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
    merged = merge(NODE, between, names=PAIR)
    assert str(merged.profile.cluster) == "4x8"
    assert merged.profile.link_origins == {"intra": 0, "inter": 1}
    assert merged.profile.series["point_to_point/uint8@2/inter"].origin == 1


def test_of_a_series_that_both_have_the_first_is_kept_and_it_is_said() -> None:
    slower = measured_profile(
        Cluster(1, 8), series("all_to_all", 8, "intra", b_s=1e-8), series("all_gather", 8, "intra")
    )
    merged = merge(NODE, slower, names=PAIR)
    assert merged.profile.series["all_to_all/uint8@8/intra"] == NODE.series["all_to_all/uint8@8/intra"]
    assert merged.profile.series["all_gather/uint8@8/intra"].origin == 1
    assert merged.notes[-1] == "both have the series all_to_all/uint8@8/intra: taken from a.json"


def test_two_that_say_the_same_of_the_cluster_agree() -> None:
    assert merge(NODE, NODE, names=PAIR).notes[0] == "cluster 1x8: a.json and b.json agree"
    assert merge(NODE, describe("2x8"), names=PAIR).notes[0] == "cluster 2x8: a.json says 1x8, b.json 2x8"


def test_series_stand_in_the_order_of_the_cases_after_a_merge_and_after_a_file(tmp_path: Path) -> None:
    pairs = measured_profile(Cluster(1, 8), series("point_to_point", 2, "intra"), series("all_reduce", 8, "intra"))
    merged = merge(pairs, NODE, names=PAIR).profile
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
        (describe("2x4", ["inter=50:5"]), "a.json has 8 devices per node, b.json 4"),
        (measured_profile(Cluster(2, 8), device="CPU"), "a.json was measured on GPU, b.json on CPU"),
    ]
    for other, message in cases:
        with pytest.raises(MismatchError, match=message):
            merge(NODE, other, names=PAIR)
    with pytest.raises(MismatchError, match=r"a\.json has 4 nodes, b\.json 2"):
        merge(describe("4x8"), describe("2x8"), names=PAIR)


PAIRS, EXCHANGE = series("point_to_point", 2, "intra", b_s=5e-10), series("all_to_all", 4, "intra")


@pytest.mark.parametrize(
    ("measured", "s_per_byte"),
    [([PAIRS, EXCHANGE], 1e-9), ([PAIRS], 5e-10), ([series("all_to_all", 2, "intra", b_s=1e-8), EXCHANGE], 1e-9)],
    ids=["both", "pairs alone", "some ranks"],
)
def test_links_come_from_the_all_to_all_of_all_ranks_and_else_from_pairs(
    measured: list[Series], s_per_byte: float
) -> None:
    found = measured_links(Cluster(1, 4), {one.key: one for one in measured})
    assert found["intra"].s_per_byte == pytest.approx(s_per_byte)
    assert measured_links(Cluster(1, 4), {}) == {}


def test_between_nodes_a_byte_that_crosses_costs_what_all_bytes_took() -> None:
    found = series("all_to_all", 8, "inter", b_s=2e-10)
    links = measured_links(Cluster(2, 4), {found.key: found})
    assert set(links) == {"inter"}
    line, block = known(found.fit).alpha_beta, 1_000_000
    crossing = links["inter"].latency_s + links["inter"].s_per_byte * 4 * block
    assert crossing == pytest.approx(line.a_s + line.b_s * 7 * block)


@pytest.mark.parametrize(("faster", "shared_by"), [(0.9, 1.0), (1.4, 1.0), (1.6, 1.6), (3.0, 3.0), (6.0, 4.0)])
def test_a_pair_between_nodes_that_is_faster_alone_shares_its_link(faster: float, shared_by: float) -> None:
    """Of 2 x 4 ranks; of 7 blocks of an all-to-all 4 cross between nodes, 7/4 of its time for each byte."""
    together = series("all_to_all", 8, "inter", b_s=2e-10)
    pair = series("point_to_point", 2, "inter", b_s=2e-10 * 7 / 4 / faster)
    links = measured_links(Cluster(2, 4), {one.key: one for one in (together, pair)})
    assert links["inter"].shared_by == pytest.approx(shared_by)
    assert links["inter"].s_per_byte == pytest.approx(2e-10 * 7 / 4)


def test_a_time_that_does_not_grow_with_size_tells_of_no_bandwidth() -> None:
    flat = series("all_to_all", 4, "intra", b_s=0.0)
    falling = [Measurement.of(one.size, one.work, [1.0 / (index + 1)]) for index, one in enumerate(flat.measurements)]
    fit = fit_series(CASES["all_to_all"], 4, falling)
    assert measured_links(Cluster(1, 4), {flat.key: flat.model_copy(update={"fit": fit})}) == {}


def test_a_time_that_grows_by_less_than_any_hardwares_is_that_of_the_fastest_link() -> None:
    measured = known(EXCHANGE.fit)
    fit = replace(measured, alpha_beta=replace(measured.alpha_beta, b_s=1e-20))
    found = measured_links(Cluster(1, 4), {EXCHANGE.key: EXCHANGE.model_copy(update={"fit": fit})})
    assert found["intra"].s_per_byte == FASTEST
