"""Merging: one profile of several, each part with its origin."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MismatchError, UsageError
from .cluster import Cluster, Link
from .origin import Origin
from .profile import Profile, load
from .series import LinkKind


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged profile, and notes on choices between its parts."""

    profile: Profile
    notes: tuple[str, ...]


def merge_files(paths: Sequence[str | os.PathLike[str]]) -> Merged:
    """The profiles in these files as one, the first before the second and so on; see `merge`.

    Raises
    ------
    UsageError
        Fewer than two.
    InputError
        A file is no profile.
    """
    if len(paths) < 2:
        raise UsageError(f"{len(paths)} profiles to merge; expected two or more")
    profile, name = load(paths[0]), str(paths[0])
    notes: list[str] = []
    for path in paths[1:]:
        merged = merge(profile, load(path), names=(name, str(path)))
        profile, name = merged.profile, "the profiles before it"
        notes += merged.notes
    return Merged(profile, tuple(notes))


def merge(first: Profile, second: Profile, *, names: tuple[str, str]) -> Merged:
    """Two profiles as one.

    Parameters
    ----------
    names
        Of the two, for notes, errors and origins: their paths.

    Raises
    ------
    MismatchError
        The profiles are of different devices, nodes or numbers of nodes; what differs is named.

    Notes
    -----
    * Cluster: a profile of one node gives the devices per node, one of several nodes gives the nodes. Two of several
      nodes, or of one, must agree; a profile of one rank a node agrees with any node.
    * Links: the profile of the node gives "intra" and the other "inter", as far as they have them; else the first.
    * Series: all of both; of a key that both have, the first's.
    * Origins: those of both, named by the file they were read from.
    """
    cluster = _cluster(first.cluster, second.cluster, names)
    _same_device(first, second, names)
    shift = len(first.origins)
    links, link_origins, notes = _links(first, second, names)
    shifted = {
        key: series.model_copy(update={"origin": series.origin + shift}) for key, series in second.series.items()
    }
    if both := sorted(set(first.series) & set(second.series)):
        notes.append(f"both have the series {', '.join(both)}: taken from {names[0]}")
    agree = f"{names[0]} and {names[1]} agree"
    differ = f"{names[0]} says {first.cluster}, {names[1]} {second.cluster}"
    notes.insert(0, f"cluster {cluster}: {agree if str(first.cluster) == str(second.cluster) else differ}")
    profile = Profile.make(
        complete=first.complete and second.complete,
        origins=(*_named(first, names[0]), *_named(second, names[1])),
        cluster=Cluster(cluster.num_nodes, cluster.devices_per_node, links),
        link_origins=link_origins,
        series={**shifted, **first.series},
    )
    return Merged(profile, tuple(notes))


def _cluster(first: Cluster, second: Cluster, names: tuple[str, str]) -> Cluster:
    """The cluster both tell of, without links."""
    several = {one.num_nodes for one in (first, second)} - {1}
    if len(several) > 1:
        raise MismatchError(
            f"{names[0]} has {first.num_nodes} nodes, {names[1]} {second.num_nodes}; merge of one cluster"
        )
    nodes = max(several, default=1)
    # One rank a node measures between nodes and tells nothing of the node.
    whole = [one for one in (first, second) if one.num_nodes == 1 or one.devices_per_node > 1] or [first]
    devices = {one.devices_per_node for one in whole}
    if len(devices) > 1:
        raise MismatchError(
            f"{names[0]} has {first.devices_per_node} devices per node, {names[1]} {second.devices_per_node}; expected"
            " the same, or one of several nodes measured with one rank each"
        )
    return Cluster(nodes, devices.pop())


def _same_device(first: Profile, second: Profile, names: tuple[str, str]) -> None:
    """Refuse measurements on different devices."""
    devices = [profile.environment.device if profile.environment else None for profile in (first, second)]
    if None not in devices and devices[0] != devices[1]:
        raise MismatchError(
            f"{names[0]} was measured on {devices[0]}, {names[1]} on {devices[1]}; a cluster has one kind of device"
        )


def _links(
    first: Profile, second: Profile, names: tuple[str, str]
) -> tuple[dict[str, Link], dict[LinkKind, int], list[str]]:
    """Links, the index of each link's origin among those of both profiles, and a note per link."""
    parts = ((first, names[0], 0), (second, names[1], len(first.origins)))
    kinds: tuple[LinkKind, ...] = ("intra", "inter")
    links: dict[str, Link] = {}
    origins: dict[LinkKind, int] = {}
    notes = []
    for kind in kinds:
        holders = [part for part in parts if kind in part[0].cluster.links]
        # A stable sort: the first of those that are of one node (for "intra") or of several (for "inter").
        holders.sort(key=lambda part: (part[0].cluster.num_nodes == 1) != (kind == "intra"))
        if holders:
            profile, name, shift = holders[0]
            links[kind], origins[kind] = profile.cluster.links[kind], profile.link_origins[kind] + shift
            notes.append(f"link {kind}: taken from {name}" + f", not {holders[-1][1]}" * (len(holders) > 1))
    return links, origins, notes


def _named(profile: Profile, path: str) -> Sequence[Origin]:
    """The origins of a profile that was read from a path; one merged before keeps the names it got then."""
    if len(profile.origins) > 1:
        return profile.origins
    origin = profile.origins[0]
    name = f"{origin.name} ({path})" if origin.name else path
    return (origin.model_copy(update={"name": name}),)
