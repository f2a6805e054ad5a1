"""Expert groups kept whole: each in a contiguous block of slots, as routing limited to groups by their position needs.

Legend: E experts a layer; P slots; Q groups of E / Q consecutive experts; D devices of S slots.
"""

import dataclasses
from typing import Literal

import numpy as np

from ..errors import UsageError
from .arrays import Ints
from .placement import Placement

__all__ = ["Groups", "block_devices", "keeps_groups_whole", "spread"]

Groups = Literal["split", "whole"]


def keeps_groups_whole(placement: Placement, num_groups: int) -> bool:
    """Whether every E / Q slots from the first hold exactly one group, in every layer.

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
