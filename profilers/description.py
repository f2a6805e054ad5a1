"""A cluster described in words instead of measured: as text, or as `cluster.yaml`.

::

    num_nodes: 2
    devices_per_node: 8
    links:                                   # optional
      intra: {gbytes_per_s: 400, latency_us: 2}
      inter: {gbytes_per_s: 50, latency_us: 5}
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError, UsageError
from ..files import read_yaml, validated
from .cluster import Cluster, Link
from .origin import Origin, now
from .profile import Profile

MAX_YAML_BYTES = 64 * 2**10


class _LinkText(BaseModel):
    """A link class as people write it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    gbytes_per_s: float = Field(gt=0, le=1e6)
    latency_us: float = Field(ge=0, lt=1e9)


class _ClusterText(BaseModel):
    """The keys of cluster.yaml."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_nodes: int
    devices_per_node: int
    links: dict[Literal["intra", "inter"], _LinkText] = {}


def describe(cluster: str, links: Iterable[str] = ()) -> Profile:
    """The profile of a cluster that is described, not measured: no environment, no case, no fit.

    Parameters
    ----------
    cluster
        `NxG` (N nodes of G devices), or the path of a YAML file.
    links
        `KIND=GBps:us` each, in place of the file's.

    Raises
    ------
    InputError
        The file is missing, too large, no YAML or does not describe a cluster.
    UsageError
        The text is no cluster, or a link is impossible.
    """
    described = (_read(Path(cluster)) if cluster.endswith((".yaml", ".yml")) else Cluster.parse(cluster)).linked(links)
    origin = Origin(kind="described", created_at=now(), name=cluster)
    return Profile.of(origin, described)


def _read(path: Path) -> Cluster:
    """The cluster in a YAML file."""
    what = "a cluster description"
    text = validated(_ClusterText, read_yaml(path, what=what, max_bytes=MAX_YAML_BYTES), source=str(path), what=what)
    try:
        links: dict[str, Link] = {
            kind: Link(link.latency_us * 1e-6, 1e-9 / link.gbytes_per_s) for kind, link in text.links.items()
        }
        return Cluster(text.num_nodes, text.devices_per_node, links)
    except UsageError as error:
        raise InputError(f"{path}: {error}") from error
