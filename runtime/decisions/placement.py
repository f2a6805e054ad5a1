"""The expert in each slot."""

from typing import Annotated, Self

import numpy as np
from pydantic import Field

from ...errors import InputError
from ...profilers.cluster import Cluster
from ...solvers.placement import Placement, ReplicaRule
from ...traces.model import NOT_ROUTED, ModelSpec
from .decision import Decision

ExpertId = Annotated[int, Field(ge=0, lt=NOT_ROUTED)]
NumSlots = Annotated[int, Field(ge=0, le=NOT_ROUTED)]


class PlacementDecision(Decision):
    """The expert in each slot (`solvers.placement` holds the rules)."""

    key = "placement"

    slots_per_device: NumSlots | tuple[NumSlots, ...]
    physical_to_logical: tuple[tuple[ExpertId, ...], ...]
    replica_rule: ReplicaRule
    repaired: int = Field(0, ge=0)

    @classmethod
    def of(cls, placement: Placement, *, repaired: int = 0) -> Self:
        """The decision that carries a placement out."""
        slots = placement.slots.tolist()
        return cls(
            slots_per_device=slots[0] if len(set(slots)) == 1 else tuple(slots),
            physical_to_logical=tuple(map(tuple, placement.physical_to_logical.tolist())),
            replica_rule=placement.replica_rule,
            repaired=repaired,
        )

    def placement(self, model: ModelSpec, cluster: Cluster) -> Placement:
        """The placement as arrays.

        Raises
        ------
        InputError
            It is for another number of layers or devices, or breaks a rule of placements.
        """
        lengths = {len(row) for row in self.physical_to_logical}
        if len(lengths) != 1 or len(self.physical_to_logical) != model.num_layers:
            raise InputError(
                f"placement of {len(self.physical_to_logical)} layers with {sorted(lengths)} slots;"
                f" expected {model.num_layers} layers, all with the same number"
            )
        slots = self.slots_per_device
        slots_D = np.full(cluster.num_devices, slots) if isinstance(slots, int) else np.array(slots, np.int64)
        if slots_D.size != cluster.num_devices:
            raise InputError(
                f"placement for {slots_D.size} devices; the plan's cluster {cluster} has {cluster.num_devices}"
            )
        table_LP = np.array(self.physical_to_logical, dtype=np.int32)
        return Placement(table_LP, slots_D, model.num_experts, self.replica_rule)

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        """Refuse a placement that breaks a rule."""
        self.placement(model, cluster)
