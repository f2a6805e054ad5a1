"""What homes of samples cost, and the least that any could: the naive twin of what `solvers.netmoe` tells of them.

Legend: I samples; D devices; P places; X exchanges; C link classes, inside nodes (0) and between them (1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from ...solvers.netmoe import Traffic
from ...solvers.netmoe.bottleneck import Channels
from ...solvers.netmoe.port_bound import least_time

__all__ = ["HomeCost"]

Numbers = NDArray[np.float64]
LINKS = ("intra", "inter")


@dataclass(frozen=True, slots=True, eq=False)
class HomeCost:
    """The objective of a sample policy on a plan's cluster, by its name in the plan.

    Parameters
    ----------
    crosses
        Whether the way between two devices is of a link class, `[C, D, D]`.
    start, copy
        Of the busiest port, to start and a copy by link class, `[C]`; of link costs, `copy` alone.
    """

    plan: Plan
    name: str
    crosses: NDArray[np.bool_]
    start: Numbers
    copy: Numbers

    @classmethod
    def of(cls, plan: Plan, method: str) -> "HomeCost":
        """What a method minimises on this plan's cluster, in seconds where its links and sizes tell them."""
        links, size, copy_bytes = plan.cluster.links, plan.cluster.num_devices, plan.model.copy_bytes
        node = np.arange(size) // plan.cluster.devices_per_node
        far = node[:, None] != node
        crosses = np.stack([~far & ~np.eye(size, dtype=bool), far])
        ratio = max(links["inter"].s_per_byte / links["intra"].s_per_byte, 1.0) if set(LINKS) <= set(links) else 8.0
        name, start, copy = "link_cost", [0.0, 0.0], [1.0, ratio]
        if method == "bottleneck":
            used = [link for link, mask in zip(LINKS, crosses, strict=True) if mask.any()]
            name = "busiest_cost"
            if copy_bytes is not None and set(used) <= set(links):
                name = "exchange_s"
                start = [links[link].latency_s if link in used else 0.0 for link in LINKS]
                copy = [links[link].s_per_byte * copy_bytes if link in used else 0.0 for link in LINKS]
        return cls(plan, name, crosses, np.array(start), np.array(copy))

    def value(self, exchanges: Sequence[Numbers], device_I: NDArray[np.integer]) -> float:
        """What homes reach, given the copies `[I, D]` of each exchange."""
        total = 0.0
        for copies_ID in exchanges:
            between_DD = (device_I[None] == np.arange(copies_ID.shape[1])[:, None]).astype(float) @ copies_ID
            of_class_CDD = between_DD * self.crosses
            if self.name == "link_cost":
                total += float(self.copy @ of_class_CDD.sum(axis=(1, 2)))
            else:
                busiest_C = np.maximum(of_class_CDD.sum(axis=2).max(axis=1), of_class_CDD.sum(axis=1).max(axis=1))
                total += float((self.start + self.copy * busiest_C).max())
        return total

    def bound(self, exchanges: Sequence[Numbers], room: int) -> float:
        """What no homes with so many samples a device are under: each sample in a place of its own (Kuhn-Munkres).

        Of the busiest ports, at the weights that the solver found. Any weights prove a bound, so they need no trust.
        """
        from scipy.optimize import linear_sum_assignment

        weights, constant = np.ones((len(exchanges), 2, 2, exchanges[0].shape[1])), 0.0
        weights[:, :, 1] = 0.0
        if self.name != "link_cost":
            weights = self._weights(exchanges, room)
            constant = float((weights.sum(axis=(2, 3)) @ self.start).sum())
        cost_ID = np.zeros_like(exchanges[0])
        for copies_ID, (sent_CD, received_CD) in zip(exchanges, weights.transpose(0, 2, 1, 3), strict=True):
            weight_CDD = sent_CD[:, :, None] + received_CD[:, None, :]
            price_DD = np.einsum("c,cde,cde->de", self.copy, self.crosses, weight_CDD)
            cost_ID += copies_ID @ price_DD.T
        cost_IP = np.repeat(cost_ID, room, axis=1)
        return constant + float(cost_IP[linear_sum_assignment(cost_IP)].sum())

    def _weights(self, exchanges: Sequence[Numbers], room: int) -> Numbers:
        """Weights of the ports, `[X, C, 2, D]`, none negative and 1 together in each exchange."""
        traffic = Traffic(exchanges[0], exchanges[1] if len(exchanges) > 1 else None)
        channels = Channels.of(self.plan.cluster, self.plan.model.copy_bytes)
        room_D = np.full(self.plan.cluster.num_devices, room)
        found = np.maximum(least_time(traffic, room_D, channels).weights, 0.0)
        return np.asarray(found / found.sum(axis=(1, 2, 3), keepdims=True))
