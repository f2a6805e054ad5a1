"""The cluster a plan is made for: nodes, devices per node, links."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import UsageError

MAX_DEVICES = 65_536
NUMBER = r"([0-9.]+(?:e-?[0-9]+)?)"
FASTEST = 1e-15  # seconds a byte: ratios of links stay exact beside 1
LINK_KINDS = ("intra", "inter")


@dataclass(frozen=True, slots=True)
class Link:
    """A link class as alpha-beta: seconds to start, and seconds per byte of a device while all others send, too."""

    latency_s: float
    s_per_byte: float
    #: How many times as fast a device is while the others of its node are silent: 1 where each has a port of its own,
    #: as many as a node has devices where all of them share one
    shared_by: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.shared_by <= MAX_DEVICES:
            raise UsageError(
                f"link on which a device alone is {self.shared_by} times as fast; expected 1 (a port of its own) to"
                f" {MAX_DEVICES:,}"
            )
        if not (0 <= self.latency_s < 3600 and FASTEST <= self.s_per_byte < 1):
            raise UsageError(
                f"link with latency {self.latency_s} s and {self.s_per_byte} s/byte; expected 0 <= latency < 3600 and"
                f" a bandwidth above 1 byte/s, up to {1e-9 / FASTEST:,.0f} GB/s"
            )

    @classmethod
    def parse(cls, text: str, known: "Mapping[str, Link] | None" = None) -> tuple[str, "Link"]:
        """`KIND=GBps:us` as (kind, link), e.g. `inter=25:4.5`, or `inter=GBps:us:DEVICES` with `shared_by`.

        Without DEVICES, `shared_by` is that of the link `known` of its kind, else 1.
        """
        match = re.fullmatch(rf"(intra|inter)={NUMBER}:{NUMBER}(?::{NUMBER})?", text)
        try:
            if match is None or (match[1] == "intra" and match[4]):
                raise ValueError
            latency_s, s_per_byte = float(match[3]) * 1e-6, 1e-9 / float(match[2])
            before = (known or {}).get(match[1])
            shared_by = float(match[4]) if match[4] else 1.0 if before is None else before.shared_by
            return match[1], cls(latency_s, s_per_byte, shared_by)
        except (ValueError, ZeroDivisionError, UsageError):
            raise UsageError(
                f"link {text!r}; expected KIND=GBps:us with KIND intra or inter, for example inter=25:4.5, or"
                " inter=GBps:us:DEVICES of one on which a device alone is so many times as fast as beside the others of"
                f" its node; at most {1e-9 / FASTEST:,.0f} GB/s, and less than an hour"
            ) from None

    def among(self, before: int, after: int) -> "Link":
        """The link of nodes of so many devices `after`, told by that of nodes of so many `before`.

        Notes
        -----
        Where a device has no port of its own, a node's bytes pass G / s a second, with G devices that take s seconds a
        byte together and s / f alone. Of nodes with G' devices

            s' = max(s / f, s G' / G),        f' = f s' / s                                                     (1)
        """
        if self.shared_by == 1 or before == after:
            return self
        shared_by = max(1.0, self.shared_by * after / before)
        return dataclasses.replace(self, s_per_byte=self.s_per_byte * shared_by / self.shared_by, shared_by=shared_by)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        """The schema of JSON without a `shared_by` of 1."""
        # A plan's hash is that of its JSON: of clusters whose devices share nothing it stays that of earlier versions.
        from pydantic_core import core_schema

        def told(link: "Link", inner: Callable[[Any], dict[str, float]]) -> dict[str, float]:
            return {name: value for name, value in inner(link).items() if (name, value) != ("shared_by", 1.0)}

        schema = handler(source)
        schema["serialization"] = core_schema.wrap_serializer_function_ser_schema(told)
        return schema


@dataclass(frozen=True, slots=True)
class Cluster:
    """`num_nodes` nodes of `devices_per_node` devices; devices `[n*G, (n+1)*G)` are on node n (G devices per node)."""

    num_nodes: int
    devices_per_node: int
    #: Link class ("intra": inside a node, "inter": between nodes) to its alpha-beta; empty when unknown
    links: Mapping[str, Link] = field(default_factory=dict)

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1 or self.num_devices > MAX_DEVICES:
            raise UsageError(
                f"cluster {self.num_nodes}x{self.devices_per_node}; expected NxG with N nodes of G devices, at least"
                f" 1x1 and at most {MAX_DEVICES:,} devices in all"
            )
        if unknown := set(self.links) - set(LINK_KINDS):
            raise UsageError(f"link kinds {sorted(unknown)}; expected {' or '.join(LINK_KINDS)}")
        if "intra" in self.links and self.links["intra"].shared_by != 1:
            raise UsageError("a link intra that devices share; expected that of link inter: leave it out")
        if "inter" in self.links and self.links["inter"].shared_by > self.devices_per_node:
            raise UsageError(
                f"link inter of cluster {self}, on which a device alone is {self.links['inter'].shared_by:.3g} times as"
                f" fast; expected at most {self.devices_per_node}, the devices of a node"
            )

    @classmethod
    def parse(cls, text: str, links: Iterable[str] = ()) -> "Cluster":
        """`NxG`, e.g. `2x8`, with links as `Link.parse` takes them."""
        match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text)
        if match is None:
            raise UsageError(f"cluster {text!r}; expected NxG with N nodes of G devices, for example 2x8")
        return cls(int(match[1]), int(match[2])).linked(links)

    def linked(self, links: Iterable[str]) -> "Cluster":
        """The cluster with these links, as `Link.parse` takes them, in place of its own of their kinds.

        How devices share a link stays where a text does not say it.
        """
        stated: dict[str, Link] = {}
        for kind, link in (Link.parse(text, self.links) for text in links):
            if kind in stated:
                raise UsageError(f"two links {kind}; expected one of a kind: leave out the other")
            stated[kind] = link
        return self.joined_by(stated)

    def joined_by(self, links: Mapping[str, Link]) -> "Cluster":
        """The cluster with these links in place of its own of their kinds; UsageError for a link between one node."""
        if "inter" in links and self.num_nodes == 1:
            raise UsageError(
                f"link inter of cluster {self}; expected two or more nodes: leave it out, or give more nodes"
            )
        return dataclasses.replace(self, links={**self.links, **links})

    def links_on(self, other: "Cluster") -> dict[str, Link]:
        """The links of this cluster as the nodes of another one have them (`Link.among`)."""
        return {kind: link.among(self.devices_per_node, other.devices_per_node) for kind, link in self.links.items()}

    def given_beside(self, measured: "Cluster") -> list[str]:
        """Kinds of links that are not a measured cluster's, as these nodes have them: given in place of its curves."""
        known = measured.links_on(self)
        return sorted(kind for kind, link in self.links.items() if link != known.get(kind))

    def at_most(self, num_nodes: int, devices_per_node: int) -> "Cluster":
        """The cluster with no more nodes, and no more devices in each, on its links."""
        small = Cluster(min(self.num_nodes, num_nodes), min(self.devices_per_node, devices_per_node))
        return dataclasses.replace(small, links=self.links_on(small))

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node}"
