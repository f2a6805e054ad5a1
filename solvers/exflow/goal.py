"""The goal of a solve: what a transition is worth, the figure that is reported, the bound on it.

Legend: D devices; N nodes of G devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ..bounds import KeptBound
from ..cost import HopsKept, inter_ratio, link_cost
from ..outcome import Objective

__all__ = ["Goal", "Level"]

Level = Literal["device", "node"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Hops kept on one node, cost of hops on several.

    Parameters
    ----------
    cluster
        N nodes of G devices.
    total
        W.sum(), the transitions there are, and the pairs.
    expected
        Whether replicas make what is kept an expectation (`cost.hops_kept`), which the figure's name then says.
    paired
        Whether pairs of experts of one layer count as transitions do.

    Notes
    -----
    A transition that stays on its device is worth rho, on its node rho - 1, else 0; rho is the cost of a hop between
    nodes in hops inside one, and 1 on a single node. With KD and KN the transitions kept on devices and nodes,

        value = (rho - 1) KN + KD,    hops_kept = value / total,    hop_cost = rho - value / total
    """

    cluster: Cluster
    total: float
    expected: bool
    paired: bool = False

    @property
    def rho(self) -> float:
        """What a hop between nodes costs, in hops inside a node."""
        return inter_ratio(self.cluster) if self.cluster.num_nodes > 1 else 1.0

    @property
    def near(self) -> NDArray[np.float64]:
        """What a transition is worth by the devices it joins, `[D, D]`."""
        return self.rho - link_cost(self.cluster)

    def value(self, kept: HopsKept) -> float:
        """The value of what a placement keeps."""
        return (self.rho - 1) * float(kept.node.sum()) + float(kept.device.sum())

    def levels(self, slots: NDArray[np.int64]) -> Mapping[Level, NDArray[np.int64]]:
        """The slots `[D]` of every device and, where links are of two levels, of every node `[N]`."""
        if self.rho == 1 or self.cluster.devices_per_node == 1:
            return {"device": slots}
        return {"device": slots, "node": slots.reshape(self.cluster.num_nodes, -1).sum(axis=1)}

    def bound(self, kept: Mapping[Level, KeptBound]) -> KeptBound:
        """No placement has more value, where none keeps more transitions on places of each of the `levels`."""
        device, node = kept["device"], kept.get("node", kept["device"])
        return KeptBound((self.rho - 1) * node.value + device.value, device.kinds | node.kinds)

    def objective(self, value: float) -> Objective:
        """The figure that a value is reported as; with no transitions at all nothing hops."""
        share = value / self.total if self.total else self.rho
        prefix = "expected_" if self.expected else ""
        if self.cluster.num_nodes == 1:
            return Objective(f"{prefix}{'affinity' if self.paired else 'hops'}_kept", share, "max")
        cost = max(self.rho - share, 0.0)  # rounding takes a bound below
        return Objective(f"{prefix}{'affinity' if self.paired else 'hop'}_cost", cost, "min")
