"""The pure cost formulas that search, runtime and prediction share: copies, link costs, hops kept.

Legend: L MoE layers; E experts per layer; D devices; N nodes; T tokens; K experts per token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profilers.cluster import Cluster
from .arrays import Bools, Floats, Ints
from .placement import Placement
from .ports import remote_visits

INTER_RATIO = 8.0  # an inter-node hop in intra-node hops where the links are unknown


def remote_copies(devices: NDArray[np.integer], origin: NDArray[np.integer]) -> Ints:
    """The number of distinct devices other than its origin that each token visits, `[T]`.

    Parameters
    ----------
    devices
        The device of each chosen expert `[T, K]`, -1 where not routed; node ids count the same way.
    origin
        The device (or node) each token starts from, `[T]`.
    """
    copies_T: Ints = remote_visits(devices, origin).sum(axis=0)
    return copies_T


def inter_ratio(cluster: Cluster) -> float:
    """Cost of a hop between nodes, in hops inside a node.

    Notes
    -----
    The ratio of the links' seconds a byte, `INTER_RATIO` unless both are known; at least 1, so that a hop inside a
    node is never the dearer one.
    """
    links = cluster.links
    if "intra" in links and "inter" in links:
        return max(1.0, links["inter"].s_per_byte / links["intra"].s_per_byte)
    return INTER_RATIO


def link_cost(cluster: Cluster) -> Floats:
    """Cost of a hop between two devices, `[D, D]`, in hops inside a node: 0 for staying, 1, or `inter_ratio`."""
    node_D = np.arange(cluster.num_devices) // cluster.devices_per_node
    cost_DD = np.where(node_D[:, None] == node_D, 1.0, inter_ratio(cluster))
    np.fill_diagonal(cost_DD, 0.0)
    return cost_DD


@dataclass(frozen=True, slots=True)
class HopsKept:
    """Transitions that stay on their device and on their node, each `[L-1]`, in units of the transitions given."""

    device: Floats
    node: Floats


def hops_kept(transitions: Floats, placement: Placement, devices_per_node: int) -> HopsKept:
    """The transitions `[L-1, E, E]` that a placement keeps on the device and on the node, layer pair by layer pair.

    Notes
    -----
    Exact without replicas. With them, the expectation of a Markov chain under the rule `nearest`: `share[l, a, d]` of
    the tokens at expert a are on device d, whatever brought them there; tokens enter layer 0 from all devices alike,

        want[l+1, b, d] = sum_a W[l, a, b] share[l, a, d],        share[l+1, b, :] = nearest(want[l+1, b, :])
        device[l] = sum_{b, d} want[l+1, b, d] held[l+1, b, d]
    """
    num_experts, num_devices = placement.num_experts, placement.num_devices
    want_ED = np.ones((num_experts, num_devices))
    share_ED = _arrive(want_ED, placement.holds(0), devices_per_node)
    device_L, node_L = np.zeros(len(transitions)), np.zeros(len(transitions))
    for cut, weight_EE in enumerate(transitions):
        held_ED = placement.holds(cut + 1)
        want_ED = weight_EE.T @ share_ED
        near_ED = np.repeat(_by_node(held_ED, devices_per_node) > 0, devices_per_node, axis=1)
        device_L[cut], node_L[cut] = want_ED[held_ED].sum(), want_ED[near_ED].sum()
        want_ED[want_ED.sum(axis=1) == 0] = 1.0  # no token comes: any distribution serves
        share_ED = _arrive(want_ED, held_ED, devices_per_node)
    return HopsKept(device_L, node_L)


def _arrive(want_ED: Floats, held_ED: Bools, devices_per_node: int) -> Floats:
    """Share of an expert's tokens that ends on each device when each goes to its nearest replica, `[E, D]`."""
    stay_ED = np.where(held_ED, want_ED, 0.0)
    leave_EN = _by_node(want_ED - stay_ED, devices_per_node)
    holders_EN = _by_node(held_ED, devices_per_node)
    inside_EN = np.where(holders_EN > 0, leave_EN / np.maximum(holders_EN, 1), 0.0)
    outside_E = np.where(holders_EN > 0, 0.0, leave_EN).sum(axis=1) / holders_EN.sum(axis=1)
    moved_ED = np.repeat(inside_EN, devices_per_node, axis=1) + outside_E[:, None]
    arrived_ED = stay_ED + np.where(held_ED, moved_ED, 0.0)
    return np.asarray(arrived_ED / arrived_ED.sum(axis=1, keepdims=True))


def _by_node(x_ED: NDArray[np.generic], devices_per_node: int) -> Floats:
    """Sums over the devices of each node, `[E, N]`."""
    sum_EN: Floats = x_ED.reshape(len(x_ED), -1, devices_per_node).sum(axis=2, dtype=np.float64)
    return sum_EN
