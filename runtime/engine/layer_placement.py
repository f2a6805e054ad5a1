"""The placement of one layer, as a rank carries it out: slots, owners, devices for its tokens, rows of replicas.

Legend: E experts; D devices; S slots of this rank; P slots of all devices; R most candidates; T tokens; K experts a
token.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...solvers.arrays import Ints
from ...solvers.cost import INTER_RATIO
from ...solvers.placement import Placement, ReplicaRule
from ...solvers.replicas import ReplicaTable
from .owners import owners_of
from .replica_rows import ReplicaRows
from .step_quota import StepQuota


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a layer by device: the expert in each and its device, int64 `[S]`, and the slot of an expert on a
    device, int64 `[E, D]`.
    """

    expert: Tensor
    device: Tensor
    number: Tensor

    @classmethod
    def of(cls, placement: Placement, layer: int, device: torch.device) -> "Slots":
        """The slots of a layer of a placement, as tensors on `device`."""
        expert_S = torch.from_numpy(placement.physical_to_logical[layer]).to(device, torch.int64)
        device_S = torch.from_numpy(placement.device_of_slot).to(device)
        number_ED = expert_S.new_zeros(placement.num_experts, placement.num_devices)
        number_ED[expert_S, device_S] = torch.arange(len(expert_S), device=device)
        return cls(expert_S, device_S, number_ED)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The devices that a token held by one device may use for each expert of a layer."""

    devices: Tensor  #: int64 `[E, R]`, ascending, padded with -1
    count: Tensor  #: int64 `[E]`, at least 1
    only: Tensor | None  #: The device of each expert, int64 `[E]`, where all have but one candidate

    @classmethod
    def seen_from(cls, home: int, table: ReplicaTable, device: torch.device) -> "Replicas":
        """The candidates that `table` offers to tokens at `home`, as tensors on `device`."""
        devices_ER, count_E = map(torch.from_numpy, table.seen_from(home))
        devices_ER = devices_ER.to(device, torch.int64)
        only = devices_ER.flatten() if devices_ER.shape[1] == 1 else None
        return cls(devices_ER, count_E.to(device, torch.int64), only)

    def choose(self, ids_TK: Tensor, sample_T: Tensor, position_T: Tensor) -> Tensor:
        """The device of each token's experts, int64 `[T, K]`: candidates take turns by sample + position."""
        if self.only is not None:
            return self.only[ids_TK]
        return self.devices[ids_TK, (sample_T + position_T)[:, None] % self.count[ids_TK]]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlacement:
    """Places of a layer's experts, as this rank needs them to route tokens, compute and sum gradients."""

    #: The experts in this rank's slots, `[S]`: those that it owns, then those of each other owner, ascending
    held: list[int]
    owner: Ints  #: The device of each expert's parameters and optimizer state, int64 `[E]`
    slots: Slots  #: The slots of all devices, P of them
    replicas: Replicas  #: The devices that this rank's tokens may use
    rows: ReplicaRows | None  #: What owners and holders of replicas exchange; None where no expert has replicas
    #: The slot of each expert on this rank, -1 where another device holds it, int64 `[E + 1]`; the last entry answers
    #: the id -1
    slot_of_expert: Tensor
    devices_per_node: int  #: How many devices share the fast links
    owned: list[int]  #: The experts that this rank owns, the first of `held`
    quota: StepQuota | None = None  #: The split of every step by its counts, in place of turns

    @classmethod
    def of(
        cls,
        placement: Placement,
        layer: int,
        *,
        devices_per_node: int,
        far_cost: int = round(INTER_RATIO),
        group: dist.ProcessGroup | None,
        device: torch.device | str = "cpu",
        owner: Ints | None = None,
        counted: bool = False,
    ) -> "LayerPlacement":
        """A layer of a placement over the ranks of `group`, as tensors on `device`.

        Parameters
        ----------
        far_cost
            Of a pair that crosses nodes, in pairs that cross devices, where steps are split by their counts.
        owner
            The owners of experts before, int64 `[E]`, who stay owners of what they hold; None: nobody was.
        counted
            Whether ranks gather the counts of every forward even where no expert has replicas.
        """
        rank, device, held_ED = dist.get_rank(group), torch.device(device), placement.holds(layer)
        owner = owners_of(held_ED, owner)
        replicated = held_ED.sum() > len(held_ED)
        by_step = (replicated or counted) and placement.replica_rule is ReplicaRule.QUOTA
        held = sorted(placement.held(layer, rank), key=lambda expert: (owner[expert] != rank, owner[expert], expert))
        slot_of_expert = torch.full((placement.num_experts + 1,), -1, device=device)
        slot_of_expert[held] = torch.arange(len(held), device=device)
        return cls(
            held,
            owner,
            Slots.of(placement, layer, device),
            Replicas.seen_from(
                rank, ReplicaTable.of(placement, layer, devices_per_node, "even" if by_step else None), device
            ),
            ReplicaRows.of(held_ED, owner, held, group, device) if replicated else None,
            slot_of_expert,
            devices_per_node,
            [expert for expert in held if owner[expert] == rank],
            StepQuota.of(placement, layer, devices_per_node, far_cost, group) if by_step else None,
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.slot_of_expert) - 1
