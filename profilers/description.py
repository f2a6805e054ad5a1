"""A cluster described in words instead of measured: as text, or as `cluster.yaml`; alone, or with curves of its nodes.

::

    num_nodes: 2
    devices_per_node: 8
    links:                                   # optional
      intra: {gbytes_per_s: 400, latency_us: 2}
      inter: {gbytes_per_s: 50, latency_us: 5}     # of a device; `shared_by: 8` where all 8 share one link
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError, UsageError
from ..files import read_yaml, validated
from .cluster import Cluster, Link
from .fits.fit import Fit
from .fits.laws import AlphaBeta, AttentionLaw
from .origin import Origin, now
from .profile import Profile
from .series import Series
from .topology import measured_links

MAX_YAML_BYTES = 64 * 2**10


class _LinkText(BaseModel):
    """A link class as people write it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    gbytes_per_s: float = Field(gt=0, le=1e6)
    latency_us: float = Field(ge=0, lt=1e9)
    shared_by: float = 1.0


class _ClusterText(BaseModel):
    """The keys of cluster.yaml."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_nodes: int
    devices_per_node: int
    links: dict[Literal["intra", "inter"], _LinkText] = {}


def describe(cluster: str, links: Iterable[str] = (), attention: str | None = None) -> Profile:
    """The profile of a cluster that is described, not measured: no environment, and no fit but that of attention.

    Parameters
    ----------
    cluster
        `NxG` (N nodes of G devices), or the path of a YAML file.
    links
        `KIND=GBps:us[:DEVICES]` each (`Link.parse`), in place of the file's.
    attention
        `NS:PS@M`: nanoseconds a token, picoseconds a token squared, of a model of hidden size M.

    Raises
    ------
    InputError
        The file is missing, too large, no YAML or does not describe a cluster.
    UsageError
        The text is no cluster, a link is impossible, or attention is no law.
    """
    origin = Origin(kind="described", created_at=now(), name=cluster)
    found = Profile.of(origin, _cluster(cluster).linked(links))
    if attention is None:
        return found
    series = _attention(attention)
    return found.model_copy(update={"series": {series.key: series}})


def _attention(text: str) -> Series:
    """The series of attention that a text describes."""
    number = r"([0-9.]+(?:e-?[0-9]+)?)"
    match = re.fullmatch(rf"{number}:{number}@([0-9]{{1,6}})", text)
    try:
        if match is None:
            raise ValueError
        token_s, square_s, hidden = float(match[1]) * 1e-9, float(match[2]) * 1e-12, int(match[3])
        law = AttentionLaw(start_s=0.0, projection_s=token_s / hidden**2, score_s=square_s / hidden)
    except (ValueError, ZeroDivisionError, InputError):
        raise UsageError(
            f"--attention {text:.40}; expected NS:PS@HIDDEN, nanoseconds a token and picoseconds a token squared of a"
            " model of that hidden size, for example 71:23@2880"
        ) from None
    sizes = dict.fromkeys(law.axes, (0, 2**30))
    line = AlphaBeta(a_s=0.0, b_s=max(law.projection_s, law.score_s))
    fit = Fit(axes=law.axes, model=law, alpha_beta=line, held_out={}, measured=sizes)
    return Series(case="attention", dtype="bf16", ranks=1, unit="macs", fit=fit)


def on_cluster(profile: Profile, cluster: str | None, links: Sequence[str] = ()) -> Profile:
    """The curves of one node, read from tables, on a described cluster of such nodes.

    Parameters
    ----------
    profile
        Of one node.
    cluster, links
        As of `describe`; None: the profile's own cluster.

    Returns
    -------
    Profile
        Inside a node the collectives over as many devices as it has, and their link. A link given stands in place of
        the curves that crossed a link of its kind.

    Raises
    ------
    UsageError
        A link is neither given nor measured: between nodes, or over so many devices per node.
    """
    if cluster is None and not links:
        return profile
    own = Cluster(profile.cluster.num_nodes, profile.cluster.devices_per_node)
    described = (own if cluster is None else _cluster(cluster)).linked(links)
    kept = {key: series for key, series in profile.series.items() if series.link not in described.links}
    measured = measured_links(described, kept)
    placed = replace(described, links={**measured, **described.links})
    _check_links(placed, profile)
    given = " and ".join(([f"cluster {cluster}"] if cluster else []) + [f"link {link}" for link in links])
    return profile.model_copy(
        update={
            "created_at": now(),
            "origins": (*profile.origins, Origin(kind="described", created_at=now(), name=given)),
            "cluster": placed,
            "link_origins": {kind: 0 if kind in measured else len(profile.origins) for kind in placed.links},
            "series": kept,
        }
    )


def _check_links(cluster: Cluster, profile: Profile) -> None:
    """Refuse a cluster of which a link is not known."""
    name, devices = (profile.origins[0].name or "the profile").split(":")[0], cluster.devices_per_node
    if cluster.num_nodes > 1 and "inter" not in cluster.links:
        raise UsageError(
            f"cluster {cluster} of {name}, which was measured inside one node; give the link between nodes as"
            " --link inter=GBps:us, for example --link inter=50:5 for 400 Gb/s InfiniBand"
        )
    if devices > 1 and "intra" not in cluster.links:
        ranks = sorted({one.ranks for one in profile.series.values() if one.case == "all_to_all"})
        raise UsageError(
            f"cluster {cluster}: no all-to-all of {devices} devices in {name}, which has"
            f" {', '.join(map(str, ranks)) or 'none'}; take nodes of these sizes, or give --link intra=GBps:us"
        )


def _cluster(cluster: str) -> Cluster:
    return _read(Path(cluster)) if cluster.endswith((".yaml", ".yml")) else Cluster.parse(cluster)


def _read(path: Path) -> Cluster:
    """The cluster in a YAML file."""
    what = "a cluster description"
    text = validated(_ClusterText, read_yaml(path, what=what, max_bytes=MAX_YAML_BYTES), source=str(path), what=what)
    try:
        links: dict[str, Link] = {
            kind: Link(link.latency_us * 1e-6, 1e-9 / link.gbytes_per_s, link.shared_by)
            for kind, link in text.links.items()
        }
        return Cluster(text.num_nodes, text.devices_per_node).joined_by(links)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
