"""Placements that change between steps, recounted: what gradient sums and moves they ask for, expert by expert.

Legend: B steps; L MoE layers; D devices, S slots of each; R periods; C link classes.
"""

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...profilers.cluster import Cluster

Numbers = NDArray[np.int64]


class NaiveChanges:
    """The tables of a run, `[R, L, D, S]`, -1 in empty slots, and the period of every step, `[B]`.

    CertificationError where an expert is nowhere, or twice on a device.
    """

    def __init__(self, tables: Numbers, period: Numbers, num_experts: int, cluster: Cluster) -> None:
        self.tables, self.period, self.cluster = tables, period, cluster
        self.num_classes = (cluster.devices_per_node > 1) + (cluster.num_nodes > 1)
        self.held = [
            [[[*map(int, row[row >= 0])] for row in table] for table in layers] for layers in tables
        ]  # [R][L][D] -> experts
        for layers in self.held:
            for layer, devices in enumerate(layers):
                if any(len({*experts}) < len(experts) for experts in devices):
                    raise CertificationError(f"layer {layer}: an expert is twice on a device after a change")
                if len({expert for experts in devices for expert in experts}) < num_experts:
                    raise CertificationError(f"layer {layer}: an expert is nowhere after a change")

    def table(self, step: int, layer: int) -> Numbers:
        """The table of a layer at a step, `[D, S]`."""
        return np.asarray(self.tables[self.period[min(step, len(self.period) - 1)], layer])

    def sums(self) -> NDArray[np.float64]:
        """Gradient rows that leave and reach each device, `[2, B, L, C, 2, D]`: among replicas, then to owners.

        Of r replicas each sends one r-th to every other one, and the r-th that it added up to the owner.
        """
        rows = np.zeros((2, *self.tables.shape[:2], self.num_classes, 2, self.cluster.num_devices))
        for layer in range(self.tables.shape[1]):
            owner = dict[int, int]()
            for period in range(len(self.tables)):
                owner = self._owners(period, layer, owner)
                for expert, holders in self._holders(period, layer).items():
                    replicas = [device for device in holders if device != owner[expert]]
                    for device in replicas:
                        for other in (*replicas, owner[expert]):
                            if other != device:
                                link = rows[int(other == owner[expert]), period, layer, self._kind(device, other)]
                                link[0, device] += 1 / len(replicas)
                                link[1, other] += 1 / len(replicas)
        return np.asarray(rows[:, self.period])

    def moves(self) -> NDArray[np.float64]:
        """Experts that leave (0) and reach (1) each device before a step, `[B, L, C, 2, D]`: those whose owner changes.

        An owner keeps an expert while it holds it; else one of its node's holders takes it, else any, the one that owns
        fewest.
        """
        moved = np.zeros((len(self.period), self.tables.shape[1], self.num_classes, 2, self.cluster.num_devices))
        for layer in range(self.tables.shape[1]):
            owner, before = dict[int, int](), -1
            for step, period in enumerate(self.period.tolist()):
                if period == before:
                    continue
                after = self._owners(period, layer, owner)
                for expert, device in after.items() if before >= 0 else ():
                    if device != owner[expert]:
                        kind = self._kind(owner[expert], device)
                        moved[step, layer, kind, 0, owner[expert]] += 1
                        moved[step, layer, kind, 1, device] += 1
                owner, before = after, period
        return moved

    def _owners(self, period: int, layer: int, before: dict[int, int]) -> dict[int, int]:
        holders, owned = self._holders(period, layer), [0] * self.cluster.num_devices
        kept = {expert: device for expert, device in before.items() if device in holders[expert]}
        for device in kept.values():
            owned[device] += 1
        owner = dict[int, int]()
        for expert in sorted(holders):
            if expert not in kept:
                home = before.get(expert)
                near = holders[expert]
                if home is not None:
                    node = home // self.cluster.devices_per_node
                    near = [one for one in near if one // self.cluster.devices_per_node == node] or near
                kept[expert] = min(near, key=lambda one: (owned[one], one))
                owned[kept[expert]] += 1
            owner[expert] = kept[expert]
        return owner

    def _holders(self, period: int, layer: int) -> dict[int, list[int]]:
        """The devices of every expert, ascending."""
        holders = dict[int, list[int]]()
        for device, experts in enumerate(self.held[period][layer]):
            for expert in experts:
                holders.setdefault(expert, []).append(device)
        return holders

    def _kind(self, one: int, other: int) -> int:
        """The link class between two devices."""
        group = self.cluster.devices_per_node
        return 0 if self.num_classes == 1 else int(one // group != other // group)
