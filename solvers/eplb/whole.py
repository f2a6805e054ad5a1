"""Expert groups kept whole: packed as if a group were an expert, or each on devices of its own.

Legend: B steps; L MoE layers; E experts a layer; D devices; Q groups.
"""

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..whole_groups import block_devices
from .layers import Layers
from .rows import pinned_groups

__all__ = ["whole_layers"]


def whole_layers(
    loads: NDArray[np.float64],
    slots: NDArray[np.int64],
    pinned: NDArray[np.bool_],
    num_groups: int | None,
    quantile: float | None,
) -> tuple[Layers, int]:
    """The layers to balance, and how many experts each of theirs stands for.

    Where a device holds one group or several, a layer's experts are the groups. Where a group fills several devices,
    these are a node of its own: group q goes to block q, which is as good as any, or where it is pinned.

    Parameters
    ----------
    loads, slots, pinned
        `[L, E]` or `[B, L, E]`, `[D]`, `[D, E]`.

    Raises
    ------
    UsageError
        Groups that cannot be whole, or not with these pins.
    """
    num_experts = loads.shape[-1]
    if num_groups is None:
        raise UsageError("whole groups of a model without expert groups; expected one with them, or --groups split")
    width = block_devices(num_experts, num_groups, slots)
    num_blocks = num_groups if width else len(slots)
    pinned_NQ = pinned_groups(pinned, num_blocks, num_groups)
    if (pinned_NQ.sum(axis=0) > 1).any() or (pinned_NQ.sum(axis=1) > num_groups // num_blocks).any():
        raise UsageError(
            f"pins need an expert group in two places, or more than {num_groups // num_blocks} in one; expected pins"
            " that leave groups whole (--groups whole)"
        )
    if width:
        return Layers.of(loads, slots, pinned, num_groups, num_groups, quantile), 1
    size = num_experts // num_groups
    load_BLQ = loads.reshape(*loads.shape[:-1], num_groups, size).sum(axis=-1)
    return Layers.of(load_BLQ, slots // size, pinned_NQ, 1, None, quantile), size
