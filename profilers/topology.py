"""The topology of a measured world: which ranks share a node, by the machines and by the times, and its links."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..errors import InputError
from .cluster import FASTEST, Cluster, Link
from .fits.fit import Fit
from .series import LinkKind, Series

Pair = tuple[int, int]
MIN_SPAN = 64  # times as much work as the smallest: a line through nearer sizes tells no bandwidth
MIN_SHARED = 1.5  # times as fast a pair is alone, from which on it is taken to share its link with others
MIN_RATIO = 2.0  # between the slowest pair of one class and the fastest of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes and devices of the ranks of a measured world."""

    node_of_rank: tuple[int, ...]  #: The node of each rank, numbered in order of first appearance
    #: Ranks of one number reach each other faster than others, as measured and told by nobody; all alike where the
    #: times tell one class only, None where pairs were not measured
    island_of_rank: tuple[int, ...] | None = None
    #: How many times longer the fastest pair between islands takes than the slowest inside one; None without two
    #: classes
    ratio: float | None = None

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        for name, places in (("nodes", self.node_of_rank), ("islands", self.island_of_rank)):
            if places is not None and (places != numbered(places) or len(places) != len(self.node_of_rank)):
                raise InputError(f"{name} of ranks {str(places)[:60]}; expected numbers in order of first appearance")
        two_classes = len(set(self.island_of_rank or ())) > 1
        if not self.node_of_rank or two_classes != (self.ratio is not None) or (self.ratio or MIN_RATIO) < MIN_RATIO:
            raise InputError(f"islands {str(self.island_of_rank)[:60]} {self.ratio} times apart; expected both or none")

    @property
    def agrees(self) -> bool:
        """Check whether the times do not contradict the machines."""
        return self.island_of_rank in (None, self.node_of_rank) or self._one_rank_a_node

    @property
    def _one_rank_a_node(self) -> bool:
        """Check whether every pair of ranks is between nodes, so that one class is expected."""
        return len(set(self.node_of_rank)) == len(self.node_of_rank) and self.ratio is None

    def __str__(self) -> str:
        nodes, ranks = len(set(self.node_of_rank)), len(self.node_of_rank)
        ranks_and_nodes = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
        if self.island_of_rank is None:
            return ranks_and_nodes
        if self.ratio is None:
            times = "the point-to-point times tell one class of links"
        else:
            count = len(set(self.island_of_rank))
            times = f"the point-to-point times tell two classes of links, {self.ratio:.1f} times apart: {count} islands"
        return f"{ranks_and_nodes}; {times}{', which are the nodes' * (self.agrees and self.ratio is not None)}"


def numbered(places: Sequence[object]) -> tuple[int, ...]:
    """Numbers of places in order of first appearance: `[b, b, a] -> (0, 0, 1)`."""
    order = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(order[place] for place in places)


def islands(seconds: Sequence[Mapping[Pair, float]], num_ranks: int) -> tuple[tuple[int, ...], float | None]:
    """The island of each rank and the ratio between the two classes, told from the times of pairs alone.

    Parameters
    ----------
    seconds
        Times of all pairs `(first, second)`, once for each size looked at: the smallest tells latencies, the largest
        bandwidths.

    Notes
    -----
    For each size the times are sorted and cut at the largest gap t_(i+1) / t_i. The cut counts when the gap is at
    least 2 and "is fast" is an equivalence relation on the ranks whose classes, the islands, have one size of at
    least 2: else a slow pair would look like a slow link. The cut of the larger gap is taken.
    """
    cuts = [cut for times in seconds if (cut := _cut(times, num_ranks)) is not None]
    return max(cuts, key=lambda cut: cut[1], default=((0,) * num_ranks, None))


def measured_links(cluster: Cluster, series: Mapping[str, Series]) -> dict[str, Link]:
    """The link of each class that a series crossed in a time that grew with size.

    Parameters
    ----------
    cluster
        N nodes of G devices.

    Notes
    -----
    From the all-to-all of the class (of the G ranks of a node, or of all ranks on several), the exchange of expert
    parallelism itself, else from the point-to-point, a pair alone on the wire. Their fits t = a + b n count as n the
    bytes that leave a rank; all of them cross the links of the node where the ranks share one, and the pair's link
    between two ranks: Link(a, b). Of an all-to-all of all P ranks on several nodes, P - G of the P - 1 blocks that
    leave a rank go between nodes, and are taken to decide the time, so that a byte between nodes costs

        b_inter = b (P - 1) / (P - G)                                                                           (1)

    A pair between nodes takes b_pair a byte alone on the wire: b_inter / b_pair times as fast as beside all others, at
    most G times as where the G devices of a node share one link. Below `MIN_SHARED` that is put down to the all-to-all,
    and each has a port of its own; above it is taken for sharing, though a slow all-to-all looks alike.
    """
    kinds: tuple[LinkKind, ...] = ("intra", "inter")
    links: dict[str, Link] = {kind: link for kind in kinds if (link := _link(kind, cluster, series)) is not None}
    pair = _fitted("point_to_point", 2, "inter", series)
    if "inter" in links and pair is not None:
        times = min(links["inter"].s_per_byte / max(pair.alpha_beta.b_s, FASTEST), float(cluster.devices_per_node))
        if times >= MIN_SHARED:
            links["inter"] = replace(links["inter"], shared_by=times)
    return links


def _cut(times: Mapping[Pair, float], num_ranks: int) -> tuple[tuple[int, ...], float] | None:
    ascending = sorted(times.values())
    gaps = [(after / before, before) for before, after in itertools.pairwise(ascending)]
    ratio, slowest_fast = max(gaps, default=(1.0, 0.0))
    if ratio < MIN_RATIO:
        return None
    fast = {pair for pair, time in times.items() if time <= slowest_fast}
    near = [
        frozenset(peer for peer in range(num_ranks) if peer == rank or {(rank, peer), (peer, rank)} & fast)
        for rank in range(num_ranks)
    ]
    partition = sum(map(len, set(near))) == num_ranks  # then near sets are equal or disjoint
    even = len(set(map(len, near))) == 1  # at least 2, since the fastest pair is near
    return (numbered(near), ratio) if partition and even else None


def _link(kind: LinkKind, cluster: Cluster, series: Mapping[str, Series]) -> Link | None:
    together = cluster.devices_per_node if kind == "intra" else cluster.num_devices
    for case, ranks in (("all_to_all", together), ("point_to_point", 2)):
        if (fit := _fitted(case, ranks, kind, series)) is not None:
            share = 1.0
            if kind == "inter" and case == "all_to_all":
                share = (cluster.num_devices - 1) / (cluster.num_devices - cluster.devices_per_node)  # (1)
            return Link(fit.alpha_beta.a_s, max(fit.alpha_beta.b_s * share, FASTEST))
    return None


def _fitted(case: str, ranks: int, kind: LinkKind, series: Mapping[str, Series]) -> Fit | None:
    """The fit of the first such series that tells a bandwidth."""
    fits = (one.fit for one in series.values() if (one.case, one.ranks, one.link) == (case, ranks, kind))
    return next(filter(_tells_bandwidth, fits), None)


def _tells_bandwidth(fit: Fit | None) -> bool:
    """Check whether seconds were seen to grow over sizes that are far enough apart."""
    if fit is None or (fit.works is not None and fit.works[1] < MIN_SPAN * fit.works[0]):
        return False
    return fit.alpha_beta.grows
