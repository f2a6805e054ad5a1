"""Placements of experts: their arrays and the rules that make them valid; expert groups kept whole.

A whole group is in a contiguous block of slots, as routing limited to groups by their position needs.

Legend: L MoE layers; E experts per layer; P physical slots per layer; D devices; S slots per device; Q groups of E / Q
consecutive experts.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, UsageError
from .arrays import Bools, Ints

Groups = Literal["split", "whole"]


class ReplicaRule(StrEnum):
    """Rule by which a token chooses a replica of an expert (`solvers/replicas.py`, `step_split.py` carry it out)."""

    NEAREST = "nearest"
    EVEN = "even"
    QUOTA = "quota"
    LP = "lp"


DEALS = ("quota", "even", "capacity", "lp")  # rules by which the pairs of a step are dealt out, as `step_deals` numbers
BY_STEP = frozenset({"quota", "lp"})  # rules that go by all counts of a step (`step_split.py`), not by the token alone


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The expert in every slot of every layer.

    Raises
    ------
    InputError
        The arrays break a rule: shapes, ids in range, experts ascending on a device without repetition, every
        expert somewhere.
    """

    #: int32 `[L, P]`; the slots of device d are `[sum(S[:d]), sum(S[:d+1]))`, experts ascending inside it
    physical_to_logical: NDArray[np.int32]
    slots: Ints  #: S, int64 `[D]`
    num_experts: int  #: E
    replica_rule: ReplicaRule = ReplicaRule.NEAREST  #: Which replica a token uses

    def __post_init__(self) -> None:
        table_LP, slots_D = np.asarray(self.physical_to_logical), np.asarray(self.slots)
        if table_LP.ndim != 2 or slots_D.ndim != 1 or (slots_D < 0).any() or slots_D.sum() != table_LP.shape[1]:
            raise InputError(
                f"placement of shape {list(table_LP.shape)} for {slots_D.size} devices with"
                f" {slots_D.sum() if slots_D.size else 0} slots in all; expected one row a layer and one column a slot"
            )
        self._check_experts(table_LP, np.repeat(np.arange(slots_D.size), slots_D))

    def _check_experts(self, table_LP: NDArray[np.int32], device_P: Ints) -> None:
        if table_LP.size and not 0 <= table_LP.min() <= table_LP.max() < self.num_experts:
            layer, slot = np.argwhere((table_LP < 0) | (table_LP >= self.num_experts))[0]
            raise InputError(
                f"placement of layer {layer} names expert {table_LP[layer, slot]} in slot {slot};"
                f" expected 0 to {self.num_experts - 1}"
            )
        same_device = device_P[1:] == device_P[:-1]
        if len(wrong := np.argwhere(same_device & (np.diff(table_LP, axis=1) <= 0))):
            layer, slot = wrong[0]
            raise InputError(
                f"placement of layer {layer} has experts {table_LP[layer, slot]} and {table_LP[layer, slot + 1]} in"
                f" slots {slot} and {slot + 1} of device {device_P[slot]}; the experts of a device ascend, each once"
            )
        for layer, row_P in enumerate(table_LP):
            absent_E = np.ones(self.num_experts, dtype=np.bool_)
            absent_E[row_P] = False
            if absent_E.any():
                raise InputError(
                    f"placement of layer {layer} leaves out expert {absent_E.argmax()} ({absent_E.sum()} of"
                    f" {self.num_experts} are nowhere); every expert needs a slot"
                )

    @classmethod
    def from_sets(
        cls,
        experts: Sequence[Sequence[Sequence[int]]],
        num_experts: int,
        replica_rule: ReplicaRule = ReplicaRule.NEAREST,
    ) -> "Placement":
        """The placement that puts `experts[layer][device]` on each device; sizes must agree between layers."""
        slots_D = np.array([len(held) for held in experts[0]], dtype=np.int64)
        rows = [[e for held in layer for e in sorted(held)] for layer in experts]
        return cls(np.array(rows, dtype=np.int32), slots_D, num_experts, replica_rule)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.physical_to_logical.shape[0])

    @property
    def num_devices(self) -> int:
        """D."""
        return int(self.slots.size)

    @property
    def num_slots(self) -> int:
        """P."""
        return int(self.physical_to_logical.shape[1])

    @property
    def device_of_slot(self) -> Ints:
        """The device of every slot, `[P]`."""
        return np.repeat(np.arange(self.num_devices), self.slots)

    @property
    def has_replicas(self) -> bool:
        """Check whether some expert has more than one slot."""
        return self.num_slots > self.num_experts

    def sends_as(self, other: "Placement") -> bool:
        """Check whether tokens go the same way as under another placement."""
        ruled = self.replica_rule == other.replica_rule or not self.has_replicas
        tables = ((self.slots, other.slots), (self.physical_to_logical, other.physical_to_logical))
        return ruled and all(np.array_equal(*both) for both in tables)

    def held(self, layer: int, device: int) -> list[int]:
        """The experts of a layer in the slots of a device, ascending."""
        experts: list[int] = self.physical_to_logical[layer, self.device_of_slot == device].tolist()
        return experts

    def holds(self, layer: int) -> Bools:
        """Mask of the devices that hold each expert of a layer, `[E, D]`."""
        held_ED = np.zeros((self.num_experts, self.num_devices), dtype=np.bool_)
        held_ED[self.physical_to_logical[layer], self.device_of_slot] = True
        return held_ED


def slots_for(
    num_experts: int,
    num_devices: int,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    *,
    redundant: int = 0,
) -> Ints:
    """Slots of every device, `[D]`.

    Parameters
    ----------
    slots
        One number for all devices or one a device; None: the fewest equal ones that hold every expert.
    redundant
        Slots beyond E in all, spread so that every device has the same number; not beside `slots`.

    Raises
    ------
    UsageError
        Too few slots for the experts, or so many that a device would hold an expert twice.
    """
    if slots is None:
        total = num_experts + redundant
        if redundant and total % num_devices:
            raise UsageError(
                f"{num_experts} experts and {redundant} redundant slots do not divide by {num_devices} devices;"
                f" the next that does is --redundant {redundant + (-total) % num_devices}"
            )
        slots = -(-total // num_devices)
    slots_D = np.full(num_devices, slots) if np.ndim(slots) == 0 else np.asarray(slots)
    if slots_D.shape != (num_devices,):
        raise UsageError(f"slots given for {slots_D.size} devices; expected one number or {num_devices}")
    listed = " to ".join(map(str, dict.fromkeys((slots_D.min(), slots_D.max()))))
    experts = f"{num_experts} expert{'s' * (num_experts != 1)}"
    if (slots_D < 0).any() or (slots_D > num_experts).any():
        raise UsageError(
            f"{listed} slots per device for {experts}; expected 0 to {num_experts}, since a device holds an expert"
            f" once: at most {num_experts * num_devices} slots, {num_experts * (num_devices - 1)} of them redundant"
        )
    if slots_D.sum() < num_experts:
        raise UsageError(
            f"{slots_D.sum()} slots on {num_devices} devices for {experts};"
            f" expected at least {-(-num_experts // num_devices)} a device"
        )
    return slots_D.astype(np.int64)


def keeps_groups_whole(placement: Placement, num_groups: int) -> bool:
    """Check whether every E / Q slots from the first hold exactly one group, in every layer.

    Only then a checkpoint can carry the placement: groups change places, and experts inside them.
    """
    size, left_over = divmod(placement.num_experts, num_groups)
    if left_over or placement.num_slots != placement.num_experts:
        return False
    group_LQE = placement.physical_to_logical.reshape(placement.num_layers, num_groups, size) // size
    return bool((group_LQE == group_LQE[:, :, :1]).all())


def block_devices(num_experts: int, num_groups: int, slots: Ints) -> int:
    """Devices that a group fills; 0 where a device holds one or more whole groups.

    Raises
    ------
    UsageError
        Groups that are not of equal size, more or fewer slots than experts, or devices that groups would straddle.
    """
    if num_groups < 1 or num_experts % num_groups:
        raise UsageError(
            f"{num_experts} experts in {num_groups} groups; expected groups of equal size (--groups whole)"
        )
    if slots.sum() != num_experts or (slots != slots[0]).any():
        raise UsageError(
            f"{slots.sum()} slots, {slots.min()} to {slots.max()} a device, for {num_experts} experts in whole groups;"
            " expected as many slots as experts and equally many on every device: whole groups have no replicas"
        )
    size, num_slots = num_experts // num_groups, int(slots[0])
    if size % num_slots and num_slots % size:
        raise UsageError(
            f"groups of {size} experts on devices of {num_slots} slots; expected one to be a multiple of the other, so"
            " that no group straddles devices (--groups whole)"
        )
    return 0 if num_slots >= size else size // num_slots


def spread(placement: Placement, size: int) -> Placement:
    """The placement of experts `[e * size, (e + 1) * size)` where another one has e."""
    if size == 1:
        return placement
    table_LP = placement.physical_to_logical[:, :, None] * size + np.arange(size)
    return dataclasses.replace(
        placement,
        physical_to_logical=table_LP.reshape(placement.num_layers, -1).astype(np.int32),
        slots=placement.slots * size,
        num_experts=placement.num_experts * size,
    )
