"""How much moving samples may save at most, told before anything is solved.

Legend: I samples; D devices; M sinks, the nodes, or the devices of a single node.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from .traffic import Traffic

__all__ = ["Locality", "locality"]


@dataclass(frozen=True, slots=True)
class Locality:
    """Copies between nodes (on one node: between devices) of samples dealt out blindly, and the fewest possible.

    Parameters
    ----------
    blind
        Expected when the places are dealt at random: the samples' counts and the popularity of the sinks remain.
    least
        No assignment within the capacities has fewer.
    """

    blind: float
    least: float

    @property
    def share(self) -> float:
        """The locality index: no assignment saves more than this share of `blind`."""
        return 1 - self.least / self.blind if self.blind > 0 else 0.0


def locality(traffic: Traffic, capacity: NDArray[np.integer], cluster: Cluster) -> Locality:
    """The locality of samples under a placement, in one pass over the traffic.

    Parameters
    ----------
    capacity
        The most samples a device takes, `[D]`.

    Notes
    -----
    Every sample's own best choice, capacities ignored, is a bound, but a popular sink would promise to all what few can
    have. So it is taken at prices p >= 0 of the sinks, for which weak duality gives

        least = max_p sum_i min_m (c[i, m] + p[m]) - sum_m capacity[m] p[m]

    and of two prices the better: 0, and those that make the mean cost of all sinks equal.
    """
    group = cluster.devices_per_node if cluster.num_nodes > 1 else 1
    near_IM = sum(x.reshape(len(x), -1, group).sum(axis=2) for x in traffic.exchanges)
    cost_IM = np.sum(near_IM, axis=1, keepdims=True) - near_IM
    room_M = capacity.reshape(-1, group).sum(axis=1)
    mean_M = cost_IM.mean(axis=0)
    bounds = [
        float((cost_IM + price_M).min(axis=1).sum() - room_M @ price_M)
        for price_M in (np.zeros_like(mean_M), mean_M.max() - mean_M)
    ]
    return Locality(blind=float((cost_IM @ room_M).sum() / room_M.sum()), least=max(bounds))
