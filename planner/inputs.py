"""Where a command finds its inputs when it is not told: profile.json, its cluster."""

import dataclasses
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


def cluster_for(text: str | None, profile: Path | None) -> Cluster:
    """The cluster a plan is for: `NxG` as given (with the profile's links), else the profile's."""
    from ..profilers.profile import load

    known = load(profile).cluster if profile is not None else None
    if text is not None:
        asked = Cluster.parse(text)
        return dataclasses.replace(asked, links=known.links) if known is not None else asked
    if known is None:
        raise UsageError("no cluster: there is no profile.json here; run moeplan profile, or give --cluster NxG")
    return known
