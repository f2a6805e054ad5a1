"""The published algorithm's rows, refined.

Legend: R rows of e experts and p slots on G devices; L MoE layers; N nodes.
"""

import numpy as np
from numpy.typing import NDArray

from .bounds import lowest_max
from .rows import Rows

__all__ = ["refined"]

WORK, LEAST_WORK = 4000, 200_000  # a slot, some 70 ms of a core for 58 layers of 288; and a row
NEAR = 1e-5  # a maximum so close to what bounds it, relatively, is good enough


def refined(rows: Rows, table: NDArray[np.int64], num_layers: int) -> NDArray[np.int64]:
    """Rows whose busiest devices hold no more than in a legal table `[R, p]`, experts ascending on devices.

    No node of a layer needs to be better than the best that another can be.
    """
    from .kernel import refine

    num_slots, num_experts = table.shape[1], rows.load.shape[1]
    least_LN = lowest_max(rows.load, rows.slots).reshape(num_layers, -1)
    target_R = np.repeat(least_LN.max(axis=1), least_LN.shape[1]) * (1 + NEAR)
    first = np.concatenate([[0], np.cumsum(rows.slots)])
    work = max(WORK * num_slots, LEAST_WORK)
    better_Rp = refine(rows.load, table, first, np.ascontiguousarray(rows.pinned), target_R, work)
    device_p = np.repeat(np.arange(len(rows.slots)), rows.slots)
    return np.asarray(np.sort(better_Rp + device_p * num_experts, axis=1) % num_experts)
