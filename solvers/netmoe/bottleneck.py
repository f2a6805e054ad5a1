"""The time of the exchanges as their busiest ports set it (Eq. 5), and its refinement by swaps of samples.

Legend: I samples; D devices; N nodes; P ports, those of the D devices inside their nodes, then those of the N nodes;
X exchanges.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ..cost import inter_ratio
from ..ports import link_classes
from .port_bound import busiest_bound
from .traffic import Traffic
from .volumes import crossings

__all__ = ["Channels", "refine"]

MAX_SWEEPS = 8
LEAST_GAIN = 1e-9  # relatively; less is rounding


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The ports of a cluster as alpha-beta: seconds to start, seconds a copy, each `[P]`.

    Parameters
    ----------
    name
        "exchange_s"; "busiest_cost" where a link or the bytes of a copy are unknown: then in copies inside a node, one
        between nodes counted `cost.inter_ratio` times.

    Notes
    -----
    A link's figures are those of one device's port, and the G devices of a node carry its copies side by side:

        t = max_p (alpha[p] + beta[p] load[p]),    beta[node] = beta_inter / G        (Eq. 1, busiest port)         (1)
    """

    cluster: Cluster
    alpha: NDArray[np.float64]
    beta: NDArray[np.float64]
    name: Literal["exchange_s", "busiest_cost"]

    @classmethod
    def of(cls, cluster: Cluster, copy_bytes: float | None) -> "Channels":
        """The channels of a cluster for copies of this size."""
        figures = {"intra": (0.0, 1.0), "inter": (0.0, inter_ratio(cluster))}
        classes = link_classes(cluster)
        known = copy_bytes is not None and all(kind in cluster.links for kind in classes)
        if known and copy_bytes is not None:
            figures = {kind: (link.latency_s, link.s_per_byte * copy_bytes) for kind, link in cluster.links.items()}
        alpha_P, beta_P = np.zeros((2, cluster.num_devices + cluster.num_nodes))
        for kind in classes:
            inside = kind == "intra"
            ports = slice(cluster.num_devices) if inside else slice(cluster.num_devices, None)
            alpha_P[ports], beta_P[ports] = figures[kind]
            beta_P[ports] /= 1 if inside else cluster.devices_per_node
        return cls(cluster, alpha_P, beta_P, "exchange_s" if known else "busiest_cost")

    def time(self, load: NDArray[np.float64]) -> NDArray[np.float64]:
        """The time of exchanges with loads `[..., 2, P]`, (1)."""
        return np.asarray((self.alpha + self.beta * load).max(axis=(-2, -1)))

    def total(self, traffic: Traffic, device_of_sample: NDArray[np.integer]) -> float:
        """The time of all exchanges that are looked at, one after the other (Eq. 5)."""
        loads = [crossings(x, device_of_sample, self.cluster).sum(axis=0) for x in traffic.exchanges]
        return float(sum(self.time(load_2P) for load_2P in loads))

    def bound(self, traffic: Traffic, capacity: NDArray[np.int64]) -> float:
        """No homes make the exchanges shorter; on several nodes what stays inside them is left out."""
        port = 0 if self.cluster.num_nodes == 1 else -1
        busiest = busiest_bound(traffic, capacity, self.cluster)
        return float(len(traffic.exchanges) * self.alpha[port] + self.beta[port] * busiest)


def refine(
    traffic: Traffic, device_of_sample: NDArray[np.int64], capacity: NDArray[np.int64], channels: Channels
) -> NDArray[np.int64]:
    """Homes `[I]` of a shorter time: swapped in pairs, and moved to free places, while the best partner gains.

    Parameters
    ----------
    device_of_sample
        Where to start, `[I]`.
    capacity
        The most samples a device takes, `[D]`.
    """
    device_I, num_samples = device_of_sample, len(device_of_sample)
    for _ in range(MAX_SWEEPS):
        free_R = np.flatnonzero(np.bincount(device_I, minlength=len(capacity)) < capacity)
        rows_XID = np.array([np.vstack([x, np.zeros((len(free_R), x.shape[1]))]) for x in traffic.exchanges])
        swept_I = _sweep(rows_XID, np.concatenate([device_I, free_R]), num_samples, channels)[:num_samples]
        if (swept_I == device_I).all():
            break
        device_I = swept_I
    return device_I


def _sweep(
    rows_XID: NDArray[np.float64], device_I: NDArray[np.int64], num_samples: int, channels: Channels
) -> NDArray[np.int64]:
    """Each sample in turn swapped with its best partner, where that gains; a free place is a sample without copies."""
    device_I, cluster = device_I.copy(), channels.cluster
    every_D = np.arange(cluster.num_devices)
    cross_XI2P = np.array([crossings(x_ID, device_I, cluster) for x_ID in rows_XID])
    load_X2P = cross_XI2P.sum(axis=1)
    for i, here_XI2P in _beside(rows_XID, device_I, num_samples, cluster):
        rows_XDD = np.repeat(rows_XID[:, i, None], len(every_D), axis=1)
        there_XI2P = np.array([crossings(x_DD, every_D, cluster)[device_I] for x_DD in rows_XDD])
        swapped_XI2P = (load_X2P - cross_XI2P[:, i])[:, None] - cross_XI2P + there_XI2P + here_XI2P
        time_I = np.where(device_I == device_I[i], np.inf, channels.time(swapped_XI2P).sum(axis=0))
        j = int(time_I.argmin())
        if time_I[j] < channels.time(load_X2P).sum() * (1 - LEAST_GAIN):
            load_X2P, cross_XI2P[:, i], cross_XI2P[:, j] = swapped_XI2P[:, j], there_XI2P[:, j], here_XI2P[:, j]
            device_I[i], device_I[j] = device_I[j], device_I[i]
    return device_I


def _beside(
    rows_XID: NDArray[np.float64], device_I: NDArray[np.int64], num_samples: int, cluster: Cluster
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Every sample by its device, as long as it stays there, with what all would send and receive on that device."""
    for device, on_device in [(d, np.flatnonzero(device_I[:num_samples] == d)) for d in np.unique(device_I)]:
        all_there_I = np.full_like(device_I, device)
        here_XI2P = np.array([crossings(x_ID, all_there_I, cluster) for x_ID in rows_XID])
        yield from ((int(i), here_XI2P) for i in on_device if device_I[i] == device)
