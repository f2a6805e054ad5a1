"""Profiles whose seconds follow known formulas, with a little noise."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster, Link
from moeplan.profilers.fits.fitting import fit_series
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.origin import Origin, now
from moeplan.profilers.profile import Profile, save
from moeplan.profilers.series import LinkKind, Series

SIZES: Mapping[str, list[dict[str, int]]] = {
    "all_to_all": [{"bytes": 256 << octave} for octave in range(14)],
    "all_gather": [{"bytes": 256 << octave} for octave in range(14)],
    "expert_ffn": [
        {"tokens": tokens, "experts": experts, "hidden": 64, "ffn": ffn, "grouped": grouped}
        for tokens in (8, 32, 128, 512)
        for experts in (2, 8)
        for ffn in (32, 128)
        for grouped in (0, 1)
    ],
    "attention": [
        {"batch": batch, "length": length, "hidden": hidden}
        for hidden in (64, 256)
        for batch in (1, 4)
        for length in (8, 32, 128)
    ],
}
A_S = {"all_to_all": 20e-6, "all_gather": 30e-6, "expert_ffn": 40e-6, "attention": 10e-6}
S_PER_WORK = {"all_to_all": 1e-9, "all_gather": 2e-9, "expert_ffn": 1e-10, "attention": 1e-10}


def write_profile(
    path: Path, cluster: str = "1x4", *, cases: tuple[str, ...] = tuple(SIZES), noise: float = 0.1
) -> Path:
    """Write a profile of a cluster with these cases; collectives over a node's devices, and over all of several."""
    where = Cluster.parse(cluster)
    rng = np.random.default_rng(0)
    places: list[tuple[int, int, LinkKind]] = [
        (where.devices_per_node, where.devices_per_node, "intra"),
        (where.num_nodes, where.num_devices, "inter"),
    ]
    crossed = [(ranks, link) for joined, ranks, link in places if joined > 1]
    found = {}
    for name in cases:
        for ranks, link in crossed if CASES[name].min_ranks > 1 else [(1, None)]:
            series = _series(name, ranks, link, rng, noise)
            found[series.key] = series
    links: dict[str, Link] = {link: Link(50e-6 if link == "inter" else 5e-6, 1e-9) for _, link in crossed}
    known = Cluster(where.num_nodes, where.devices_per_node, links)
    origin = Origin(kind="described", created_at=now(), name="formulas")
    save(Profile.make(origins=(origin,), cluster=known, link_origins=dict.fromkeys(links, 0), series=found), path)
    return path


def _series(name: str, ranks: int, link: LinkKind | None, rng: np.random.Generator, noise: float) -> Series:
    case = CASES[name]
    slower = 4 if link == "inter" else 1
    measured = []
    for size in SIZES[name]:
        work = case.work(size, ranks)
        seconds = (A_S[name] + S_PER_WORK[name] * slower * work) * np.exp(rng.normal(0, noise))
        measured.append(Measurement.of(size, work, [float(seconds)]))
    return Series(
        case=name,
        dtype=case.dtypes("cpu")[0],
        ranks=ranks,
        link=link,
        unit=case.unit,
        measurements=tuple(measured),
        fit=fit_series(case, ranks, measured),
    )
