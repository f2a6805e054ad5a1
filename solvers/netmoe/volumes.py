"""What crosses the cluster when samples have given homes (Eq. 3-4): in all, and through the busiest port.

Legend: I samples; D devices; N nodes; P ports, those of the D devices inside their nodes, then those of the N nodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster

__all__ = ["Volumes", "crossings", "volumes"]


@dataclass(frozen=True, slots=True)
class Volumes:
    """The copies of one exchange that cross a link; times the bytes of a copy, its bytes.

    Parameters
    ----------
    inter, intra
        Between nodes (s_inter), and between devices of one node (s_intra).
    busiest_inter, busiest_intra
        The most that a node, or a device inside its node, sends or receives.
    """

    inter: float
    intra: float
    busiest_inter: float
    busiest_intra: float


def volumes(traffic: NDArray[np.float64], device_of_sample: NDArray[np.integer], cluster: Cluster) -> Volumes:
    """The volumes of one exchange, `[I, D]` copies, with each sample on its device `[I]`."""
    load_2P = crossings(traffic, device_of_sample, cluster).sum(axis=0)
    intra_2D, inter_2N = np.split(load_2P, [cluster.num_devices], axis=1)
    return Volumes(
        inter=float(inter_2N[0].sum()),
        intra=float(intra_2D[0].sum()),
        busiest_inter=float(inter_2N.max()),
        busiest_intra=float(intra_2D.max()),
    )


def crossings(
    traffic: NDArray[np.float64], device_of_sample: NDArray[np.integer], cluster: Cluster
) -> NDArray[np.float64]:
    """The copies of each sample through every port, `[I, 2, P]`: at its home (0) and at its experts' devices (1).

    A dispatch sends at (0) and receives at (1), a combine the other way round.
    """
    num_samples, num_devices = traffic.shape
    sample, group = np.arange(num_samples), cluster.devices_per_node
    node_of_sample = device_of_sample // group
    inter_IN = traffic.reshape(num_samples, -1, group).sum(axis=2)
    inter_IN[sample, node_of_sample] = 0
    intra_ID = np.where(np.arange(num_devices) // group == node_of_sample[:, None], traffic, 0)
    intra_ID[sample, device_of_sample] = 0
    cross_I2P = np.zeros((num_samples, 2, num_devices + cluster.num_nodes))
    cross_I2P[sample, 0, device_of_sample] = intra_ID.sum(axis=1)
    cross_I2P[sample, 0, num_devices + node_of_sample] = inter_IN.sum(axis=1)
    cross_I2P[:, 1, :num_devices], cross_I2P[:, 1, num_devices:] = intra_ID, inter_IN
    return cross_I2P
