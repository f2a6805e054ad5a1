"""What crosses the cluster when samples have given homes (Eq. 3-4): in all, and through the busiest port.

Legend: I samples; D devices; N nodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ..ports import sample_copies

__all__ = ["Volumes", "volumes"]


@dataclass(frozen=True, slots=True)
class Volumes:
    """The copies of one exchange that cross a link; times the bytes of a copy, its bytes.

    Parameters
    ----------
    inter, intra
        Between nodes (s_inter), and between devices of one node (s_intra).
    busiest_inter, busiest_intra
        The most that a node (Eq. 5), or a device inside its node, sends or receives.
    """

    inter: float
    intra: float
    busiest_inter: float
    busiest_intra: float


def volumes(traffic: NDArray[np.float64], device_of_sample: NDArray[np.integer], cluster: Cluster) -> Volumes:
    """The volumes of one exchange, `[I, D]` copies, with each sample on its device `[I]`."""
    intra_2D, inter_2D = sample_copies(traffic, device_of_sample, cluster)[0]
    inter_2N = inter_2D.reshape(2, cluster.num_nodes, -1).sum(axis=2)
    return Volumes(
        inter=float(inter_2N[0].sum()),
        intra=float(intra_2D[0].sum()),
        busiest_inter=float(inter_2N.max()),
        busiest_intra=float(intra_2D.max()),
    )
