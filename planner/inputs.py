"""Where a command finds its inputs when it is not told: profile.json, its cluster."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError, UsageError
from ..profilers.cluster import Cluster

__all__ = ["cluster_for", "profile_for"]


def profile_for(path: Path | None) -> Path | None:
    """The profile asked for, else profile.json where there is one."""
    if path is not None and not path.is_file():
        raise InputError(f"{path}: no such profile; write one with moeplan profile -o {path}")
    if path is None and Path("profile.json").is_file():
        return Path("profile.json")
    return path


def cluster_for(
    text: str | None, profile: Path | None, links: Iterable[str] = (), *, on: Path | None = None
) -> Cluster:
    """The cluster a plan is for: the base's, else `NxG` with the profile's links, else the profile's.

    Parameters
    ----------
    links
        `KIND=GBps:us` each, in place of the profile's.
    """
    if on is not None:
        return _cluster_of(on, text, links)
    from ..profilers.profile import load

    known = load(profile).cluster if profile is not None else None
    asked = known if text is None else Cluster.parse(text)
    if asked is None:
        raise UsageError("no cluster: there is no profile.json here; run moeplan profile, or give --cluster NxG")
    return dataclasses.replace(asked, links=known.links if known is not None else {}).linked(links)


def _cluster_of(on: Path, text: str | None, links: Iterable[str]) -> Cluster:
    """The cluster of a plan, which may be said again, with no other beside it."""
    from ..runtime.plan import load

    found = load(on).cluster
    if list(links):
        raise UsageError(f"--link beside {on}, a plan for {found} with its own links; leave it out")
    if text is not None and str(Cluster.parse(text)) != str(found):
        raise UsageError(f"--cluster {text} beside {on}, a plan for {found}; leave --cluster out")
    return found
