"""The time of the exchanges as their busiest ports set it, and its refinement by swaps of samples.

Legend: I samples; D devices; C link classes, inside nodes (0) and between them (1); X exchanges.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ..arrays import Bools, Floats, Ints
from ..cost import inter_ratio
from ..ports import CLASSES, link_classes, sample_copies
from .traffic import Traffic


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The ports of every device as alpha-beta: seconds to start, seconds a copy, each `[C]`; 0 of an unused class.

    Notes
    -----
    Eq. 5 with the ports by which steps are predicted (`seconds.exchange_seconds`): a link's figures are those of one
    device's port, in either direction and class, and of an exchange the busiest decides,

        t = max_{c, d, direction} (alpha[c] + beta[c] copies[c, direction, d])                                     (1)

    The paper's port is a whole node's (`Volumes.busiest_inter`): equal only where the devices of a node share its
    copies evenly.
    """

    cluster: Cluster
    alpha: Floats
    beta: Floats
    #: "exchange_s"; "busiest_cost" where a link or the bytes of a copy are unknown: then in copies inside a node, one
    #: between nodes counted `cost.inter_ratio` times
    name: Literal["exchange_s", "busiest_cost"]

    @classmethod
    def of(cls, cluster: Cluster, copy_bytes: float | None) -> "Channels":
        """The channels of a cluster for copies of this size."""
        figures = {"intra": (0.0, 1.0), "inter": (0.0, inter_ratio(cluster))}
        classes = link_classes(cluster)
        known = copy_bytes is not None and all(kind in cluster.links for kind in classes)
        if known and copy_bytes is not None:
            figures = {kind: (link.latency_s, link.s_per_byte * copy_bytes) for kind, link in cluster.links.items()}
        alpha_C, beta_C = np.array([figures[kind] if kind in classes else (0.0, 0.0) for kind in CLASSES]).T.copy()
        return cls(cluster, alpha_C, beta_C, "exchange_s" if known else "busiest_cost")

    @property
    def crosses(self) -> Bools:
        """Pairs of devices that each class joins, `[C, D, D]`."""
        node_D = np.arange(self.cluster.num_devices) // self.cluster.devices_per_node
        far_DD = node_D[:, None] != node_D
        return np.stack([~far_DD & ~np.eye(len(node_D), dtype=bool), far_DD])

    def seconds(self, exchange: Floats, device_of_sample: NDArray[np.integer]) -> Floats:
        """Seconds of every port in one exchange, `[C, 2, D]`, copies `[I, D]` with samples on their devices `[I]`."""
        copies_C2D = sample_copies(exchange, device_of_sample, self.cluster)[0]
        return np.asarray(self.alpha[:, None, None] + self.beta[:, None, None] * copies_C2D)

    def total(self, traffic: Traffic, device_of_sample: NDArray[np.integer]) -> float:
        """The time of all exchanges that are looked at, one after the other, (1) each."""
        return float(sum(self.seconds(x, device_of_sample).max() for x in traffic.exchanges))


def refine(traffic: Traffic, device_of_sample: Ints, capacity: Ints, channels: Channels) -> Ints:
    """Homes `[I]` of a shorter time: moved to free places and swapped, while the best of these gains, then kicked.

    Parameters
    ----------
    device_of_sample
        Where to start, `[I]`.
    capacity
        The most samples per device takes, `[D]`.
    """
    from .state import Held
    from .swaps import shorten

    none = np.zeros(len(device_of_sample) + 1, np.int64)
    held = Held(none.astype(np.float64), none, none, 0.0, 0.0, False, capacity.astype(np.int64), 0)
    group, alpha_C, beta_C = channels.cluster.devices_per_node, channels.alpha, channels.beta
    return shorten(rows_of(traffic), device_of_sample[None].copy(), group, alpha_C, beta_C, held)[1]


def rows_of(traffic: Traffic) -> Floats:
    """Copies of every exchange, `[X, I+1, D]`, in multiples of `Traffic.unit`; the last sample is none."""
    rows_XID = np.array([np.vstack([x, np.zeros((1, x.shape[1]))]) for x in traffic.exchanges])
    return np.asarray(np.rint(rows_XID / traffic.unit) * traffic.unit)
