"""Expert groups kept whole: each in a contiguous block of slots, as routing limited to groups by their position needs.

Legend: E experts a layer; P slots; Q groups of E / Q consecutive experts; D devices of S slots.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .placement import Placement

__all__ = ["block_devices", "keeps_groups_whole", "spread"]


def keeps_groups_whole(placement: Placement, num_groups: int) -> bool:
    """Whether every E / Q slots from the first hold exactly one group, in every layer, on whole devices or inside one.

    Only then a checkpoint can carry the placement: groups change places, and experts inside them.
    """
    size, left_over = divmod(placement.num_experts, num_groups)
    if left_over or placement.num_slots != placement.num_experts or not _fits(placement.slots, size):
        return False
    block_LQE = placement.physical_to_logical.reshape(placement.num_layers, num_groups, size)
    group_LQE = np.sort(block_LQE, axis=2) // size
    return bool((group_LQE == group_LQE[:, :, :1]).all())


def block_devices(num_experts: int, num_groups: int, slots: NDArray[np.int64]) -> int:
    """Devices that a group fills; 0 where a device holds one or more whole groups.

    Raises
    ------
    UsageError
        Groups that are not of equal size, more or fewer slots than experts, or devices that groups would straddle.
    """
    size, left_over = divmod(num_experts, num_groups)
    if left_over:
        raise UsageError(
            f"{num_experts} experts in {num_groups} groups; expected groups of equal size (--groups whole)"
        )
    if slots.sum() != num_experts or (slots != slots[0]).any():
        raise UsageError(
            f"{slots.sum()} slots, {slots.min()} to {slots.max()} a device, for {num_experts} experts in whole groups;"
            " expected as many slots as experts and equally many on every device: whole groups have no replicas"
        )
    if not _fits(slots, size):
        raise UsageError(
            f"groups of {size} experts on devices of {slots[0]} slots; expected one to be a multiple of the other, so"
            " that no group straddles devices (--groups whole)"
        )
    return 0 if slots[0] >= size else int(size // slots[0])


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


def _fits(slots_D: NDArray[np.int64], size: int) -> bool:
    """Whether blocks of so many slots begin and end with devices or lie inside one."""
    end_D = np.cumsum(slots_D)
    begin_D = end_D - slots_D
    first_D, last_D = begin_D // size, (end_D - 1) // size
    inside_D = first_D == last_D  # a part of a block, or all of it
    whole_D = (begin_D % size == 0) & (end_D % size == 0)
    return bool((inside_D | whole_D | (slots_D == 0)).all())
