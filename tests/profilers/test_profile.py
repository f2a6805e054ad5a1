"""The Profile's JSON: round trips, and one clear line for every file that is none."""

import copy
import datetime
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, StorageError
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.environment import Environment
from moeplan.profilers.fits.fit import Fit
from moeplan.profilers.fits.fitting import fit_arrays
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.noise import Noise
from moeplan.profilers.origin import Origin, now
from moeplan.profilers.profile import Profile, load, parse, save
from moeplan.profilers.series import Series
from moeplan.profilers.topology import Topology

SECONDS = st.floats(1e-9, 1e4)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
MEASUREMENTS = st.builds(
    Measurement.of,
    st.fixed_dictionaries({"bytes": st.integers(0, 2**63 - 1)}),
    st.integers(1, 2**62),
    st.lists(SECONDS, min_size=1, max_size=8),
)


def fitted(works: list[int], a_s: float, b_s: float) -> Fit:
    """The fit of a line measured at some bytes."""
    bytes_S = np.array(sorted(works))
    found = fit_arrays({"bytes": bytes_S}, bytes_S.astype(float), a_s + b_s * bytes_S)
    assert found is not None
    return found


FITS = st.builds(
    fitted,
    st.lists(st.integers(1, 2**40), min_size=2, max_size=6, unique=True),
    st.floats(1e-6, 1),
    st.floats(1e-12, 1e-8),
)
LINKS = st.dictionaries(
    st.sampled_from(["intra", "inter"]), st.builds(Link, st.floats(0, 3599), st.floats(1e-15, 0.9)), max_size=2
)
CLUSTERS = st.builds(Cluster, st.integers(1, 256), st.integers(1, 256), LINKS)
ENVIRONMENTS = st.builds(
    Environment,
    device=NAMES,
    backend=NAMES,
    torch=NAMES,
    driver=st.none() | NAMES,
    nccl=st.none() | NAMES,
    cpu=NAMES,
    cpus=st.integers(1, 512),
    threads=st.integers(1, 512),
    num_ranks=st.integers(1, 512),
    num_hosts=st.integers(1, 512),
    python=NAMES,
    system=NAMES,
)


SERIES = st.builds(
    Series,
    case=NAMES,
    dtype=NAMES,
    ranks=st.integers(1, 512),
    link=st.sampled_from([None, "intra", "inter"]),
    unit=st.sampled_from(["bytes", "macs"]),
    measurements=st.lists(MEASUREMENTS, min_size=1, max_size=3, unique_by=lambda one: one.size["bytes"]).map(tuple),
    fit=st.none() | FITS,
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
        series = draw(st.lists(SERIES, max_size=2))
    return Profile.make(
        complete=draw(st.booleans()),
        origins=(origin,),
        cluster=cluster,
        link_origins=dict.fromkeys(cluster.links, 0),
        series={one.key: one for one in series},
    )


@settings(max_examples=40)
@given(profile=profiles())
def test_a_profile_is_what_its_json_says(profile: Profile) -> None:
    assert parse(json.loads(json.dumps(profile.model_dump(mode="json"))), "profile.json") == profile


KEY = "all_to_all/uint8@2/intra"


@pytest.fixture
def profile() -> Profile:
    measurement = Measurement.of({"bytes": 8}, 8, [1.0, 3.0, 2.0])
    environment = Environment(
        device="x", backend="gloo", torch="2", driver=None, nccl=None, cpu="x", cpus=2, threads=1, num_ranks=2,
        num_hosts=1, python="3.11", system="Linux",
    )  # fmt: skip
    series = Series(
        case="all_to_all",
        dtype="uint8",
        ranks=2,
        link="intra",
        unit="bytes",
        measurements=(measurement,),
        fit=fitted([8, 64, 512, 4096], 1e-5, 1e-9),
    )
    return Profile.make(
        origins=(
            Origin(
                kind="measured",
                created_at=now(),
                environment=environment,
                topology=Topology(node_of_rank=(0, 0)),
                noise=Noise(sizes=1, wide=1, reference_s=(1e-3,)),
            ),
        ),
        cluster=Cluster(1, 2, {"intra": Link(1e-5, 1e-9)}),
        link_origins={"intra": 0},
        series={KEY: series},
    )


def test_a_saved_profile_loads_as_it_was(profile: Profile, tmp_path: Path) -> None:
    save(profile, tmp_path / "deep" / "profile.json")
    assert load(tmp_path / "deep" / "profile.json") == profile
    assert profile.created_at.tzinfo == datetime.UTC


Edit = Callable[[dict[str, Any]], object]


def first(value: dict[str, Any]) -> dict[str, Any]:
    """The first measurement in a decoded profile."""
    found: dict[str, Any] = value["series"][KEY]["measurements"][0]
    return found


def fit(value: dict[str, Any]) -> dict[str, Any]:
    """The fit of the first series in a decoded profile."""
    found: dict[str, Any] = value["series"][KEY]["fit"]
    return found


TINY = dict.fromkeys(("min_s", "median_s", "p95_s", "max_s", "median_low_s", "median_high_s"), 1e-300) | {
    "samples_s": [1e-300]
}
SHAPE = ("batch", "length", "hidden")
CURVE = {"kind": "piecewise", "works": [1.0, 2.0], "seconds_at": [1.0, 1.7e308]}
LAW = {"kind": "attention", "start_s": 0.0, "projection_s": 0.0, "score_s": 1e308}
EDITS: dict[str, Edit] = {
    "no version": lambda v: v.pop("schema_version"),
    "a plan": lambda v: v.update(decisions=v.pop("series")),
    "a later version": lambda v: v.update(schema_version=3),
    "a version of a wrong type": lambda v: v.update(schema_version=[1] * 10_000),
    "a version as text": lambda v: v.update(schema_version="1"),
    "no cluster": lambda v: v.pop("cluster"),
    "an extra key": lambda v: v.update(comment="hello"),
    "an extra key that breaks lines": lambda v: v.update({"a\nb\x1b[31m" * 99: 1}),
    "an extra key in a measurement": lambda v: first(v).update(note=1),
    "an extra key in the cluster": lambda v: v["cluster"].update(racks=1),
    "a cluster of no nodes": lambda v: v["cluster"].update(num_nodes=0),
    "an absurd cluster": lambda v: v["cluster"].update(num_nodes=10**30),
    "a cluster in words": lambda v: v.update(cluster="1x2"),
    "half a node": lambda v: v["cluster"].update(num_nodes=1.5),
    "nodes as text": lambda v: v["cluster"].update(num_nodes="1"),
    "an unknown link": lambda v: v["cluster"]["links"].update(up={"latency_s": 1e-6, "s_per_byte": 1e-9}),
    "a link backwards in time": lambda v: v["cluster"]["links"]["intra"].update(latency_s=-1e-6),
    "an infinitely fast link": lambda v: v["cluster"]["links"]["intra"].update(s_per_byte=0),
    "negative seconds": lambda v: first(v)["samples_s"].__setitem__(0, -1.0),
    "zero seconds": lambda v: first(v)["samples_s"].__setitem__(0, 0),
    "absurd seconds": lambda v: first(v)["samples_s"].__setitem__(0, 1e300),
    "seconds as text": lambda v: first(v)["samples_s"].__setitem__(0, "1.0"),
    "no samples": lambda v: first(v).update(samples_s=[]),
    "samples of another shape": lambda v: first(v).update(samples_s=[[1.0, 2.0, 3.0]]),
    "percentiles of other samples": lambda v: first(v).update(median_s=1.5),
    "an interval of other samples": lambda v: first(v).update(median_low_s=1.5),
    "more samples than a run takes": lambda v: first(v).update(samples_s=[1.0] * 20_000),
    "no size": lambda v: first(v).update(size={}),
    "a negative size": lambda v: first(v)["size"].update(bytes=-8),
    "no work": lambda v: first(v).update(work=0),
    "work that is true": lambda v: first(v).update(work=True),
    "an unknown unit": lambda v: v["series"][KEY].update(unit="miles"),
    "a series under another key": lambda v: v["series"].update(gemm=v["series"][KEY]),
    "a series of no origin": lambda v: v["series"][KEY].update(origin=1),
    "a link of no origin": lambda v: v.update(link_origins={}),
    "a link of a wrong origin": lambda v: v.update(link_origins={"intra": 3}),
    "no origins": lambda v: v.update(origins=[]),
    "a falling fit": lambda v: v["series"][KEY]["fit"]["alpha_beta"].update(b_s=-1e-9),
    "an unknown model": lambda v: v["series"][KEY]["fit"]["model"].update(kind="oracle"),
    "a median error above the worst": lambda v: v["series"][KEY]["fit"]["held_out"]["alpha_beta"].update(
        median_error=9.0
    ),
    "a size of 400 digits": lambda v: first(v)["size"].update(bytes=10**400),
    "work of 400 digits": lambda v: first(v).update(work=10**400),
    "a sample below any clock": lambda v: v["series"][KEY].update(measurements=[first(v) | TINY]),
    "a size measured twice": lambda v: v["series"][KEY]["measurements"].append(first(v)),
    "a size of other axes": lambda v: v["series"][KEY]["measurements"].append(first(v) | {"size": {"m": 8}}),
    "sizes of other axes than the fit's": lambda v: first(v).update(size={"m": 8}),
    "a range of 400 digits": lambda v: fit(v)["measured"].update(bytes=[0, 10**400]),
    "a range below 0": lambda v: fit(v)["measured"].update(bytes=[-1, 8]),
    "a held-out size of 400 digits": lambda v: fit(v)["held_out"]["alpha_beta"]["sizes"].__setitem__(0, [10**400]),
    "an axis twice": lambda v: fit(v).update(axes=["bytes", "bytes"]),
    "100,000 axes": lambda v: fit(v).update(
        axes=[*map(str, range(10**5))], measured={str(n): [1, 2] for n in range(10**5)}
    ),
    "a slope beyond a day": lambda v: fit(v)["alpha_beta"].update(b_s=1e308),
    "a start beyond a day": lambda v: fit(v)["alpha_beta"].update(a_s=1e308),
    "a slope that rates cannot divide by": lambda v: fit(v)["alpha_beta"].update(b_s=5e-324),
    "a curve beyond a day": lambda v: fit(v).update(model=CURVE),
    "a law beyond a day": lambda v: v["series"][KEY].update(
        fit=fit(v) | {"axes": [*SHAPE], "measured": {axis: [1, 2] for axis in SHAPE}, "model": LAW}, measurements=[]
    ),
    "measured nowhere": lambda v: v["origins"][0].update(environment=None),
    "an environment of a description": lambda v: v["origins"][0].update(kind="described"),
    "a topology of a description": lambda v: v["origins"][0].update(kind="described", environment=None),
    "ranks on a node that no rank began": lambda v: v["origins"][0]["topology"].update(node_of_rank=[1, 0]),
    "islands of other ranks": lambda v: v["origins"][0]["topology"].update(island_of_rank=[0, 0, 0]),
    "islands that are no distance apart": lambda v: v["origins"][0]["topology"].update(island_of_rank=[0, 1]),
    "more noise than sizes": lambda v: v["origins"][0]["noise"].update(wide=2),
    "a reference of no time": lambda v: v["origins"][0]["noise"].update(reference_s=[0.0]),
    "a date that is none": lambda v: v.update(created_at="yesterday"),
    "a device that steers terminals": lambda v: v["origins"][0]["environment"].update(device="\x1b]0;owned\x07"),
    "a case that steers terminals": lambda v: v["series"][KEY].update(case="\x1b[2J"),
    "series in a list": lambda v: v.update(series=[]),
    "a lone surrogate": lambda v: v["origins"][0]["environment"].update(cpu="\ud800"),
}
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "a number": b"7",
    "binary": bytes(range(256)) * 8,
    "Parquet": b"PAR1" + bytes(64),
    "UTF-16": '{"schema_version": 1}'.encode("utf-16"),
    "NaN": b'{"schema_version": 1, "complete": NaN}',
    "infinity": b'{"schema_version": 1, "cluster": -Infinity}',
    "a number beyond floats": b'{"schema_version": 1, "cluster": {"num_nodes": 1e999}}',
    "a number of 5,000 digits": b'{"schema_version": ' + b"9" * 5000 + b"}",
    "a key twice": b'{"schema_version": 1, "schema_version": 1}',
    "deep nesting": b'{"schema_version": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "two values": b'{"schema_version": 1} {}',
}


@pytest.mark.parametrize("name", EDITS)
def test_a_changed_profile_is_refused_in_one_clear_line(profile: Profile, tmp_path: Path, name: str) -> None:
    value = copy.deepcopy(profile.model_dump(mode="json"))
    EDITS[name](value)
    _refused(tmp_path / "profile.json", json.dumps(value).encode())


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_that_is_no_profile_is_refused_in_one_clear_line(tmp_path: Path, name: str) -> None:
    _refused(tmp_path / "profile.json", TEXTS[name])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_profile_is_refused_in_one_clear_line(profile: Profile, tmp_path: Path, share: float) -> None:
    whole = json.dumps(profile.model_dump(mode="json")).encode()
    _refused(tmp_path / "profile.json", whole[: int(len(whole) * share)])


def test_a_file_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with path.open("wb") as stream:
        stream.truncate(2**40)
    with pytest.raises(InputError, match="bytes, expected a profile of at most"):
        load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="cannot be read as a profile"):
            load(path)


def _refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable(), message
    assert len(message) - len(str(path)) < 300, message


@pytest.mark.parametrize(
    ("fault", "told"),
    [(OSError(errno.ENOSPC, "No space left"), StorageError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_write_that_breaks_off_leaves_the_old_profile_and_nothing_else(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, told: type[BaseException]
) -> None:
    path = tmp_path / "profile.json"
    save(profile, path)
    before = path.read_bytes()
    write = Path.write_text

    def broken(self: Path, data: str, **kwargs: Any) -> int:
        write(self, data[: len(data) // 2], **kwargs)
        raise fault

    monkeypatch.setattr(Path, "write_text", broken)
    with pytest.raises(told):
        save(profile.model_copy(update={"complete": False}), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
