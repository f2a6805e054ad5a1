"""The links of a measured cluster: an alpha-beta line of each link class, from the series that crossed it."""

from collections.abc import Mapping

from .cluster import FASTEST, Cluster, Link
from .series import LinkKind, Series

__all__ = ["measured_links"]


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

        b_inter = b (P - 1) / (P - G)
    """
    kinds: tuple[LinkKind, ...] = ("intra", "inter")
    return {kind: link for kind in kinds if (link := _link(kind, cluster, series)) is not None}


def _link(kind: LinkKind, cluster: Cluster, series: Mapping[str, Series]) -> Link | None:
    together = cluster.devices_per_node if kind == "intra" else cluster.num_devices
    for case, ranks in (("all_to_all", together), ("point_to_point", 2)):
        for one in series.values():
            if (one.case, one.ranks, one.link) != (case, ranks, kind) or not (one.fit and one.fit.alpha_beta.grows):
                continue
            line, share = one.fit.alpha_beta, 1.0
            if kind == "inter" and case == "all_to_all":
                share = (cluster.num_devices - 1) / (cluster.num_devices - cluster.devices_per_node)
            return Link(line.a_s, max(line.b_s * share, FASTEST))
    return None
