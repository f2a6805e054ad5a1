"""What the published algorithm gives as it is, with experts that are on a device twice: for comparison only.

Legend: L MoE layers; P slots; D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...profilers.cluster import Cluster
from ..balance import replica_loads
from ..checked_counts import checked_counts
from ..placement import slots_for
from .nodes import published_groups
from .published import published
from .rows import Rows

__all__ = ["RawBalance", "raw_balance"]


@dataclass(frozen=True, slots=True)
class RawBalance:
    """How even the published placement is.

    Parameters
    ----------
    balance
        The mean over layers of max/mean device load.
    max_over_mean
        The largest of any layer.
    duplicates
        Slots in all layers whose expert is on the same device already: no engine may load such a plan.
    """

    balance: float
    max_over_mean: float
    duplicates: int


def raw_balance(
    loads: ArrayLike,
    cluster: Cluster,
    *,
    slots: int | Sequence[int] | NDArray[np.integer] | None = None,
    num_groups: int | None = None,
) -> RawBalance:
    """What `solve` with method "published" would give if nothing were repaired; parameters and errors are its."""
    loads_LE = checked_counts(loads, "loads", (None, None))
    num_layers, num_experts = loads_LE.shape
    slots_D = slots_for(num_experts, cluster.num_devices, slots)
    free_DE = np.zeros((len(slots_D), num_experts), dtype=np.bool_)
    groups_LNQ = published_groups(loads_LE, slots_D, free_DE, cluster.num_nodes, num_groups)
    rows = Rows.of(loads_LE, slots_D, free_DE, groups_LNQ)
    table_Rp, _ = published(rows.load, rows.slots, legal=False)
    expert_LP = np.take_along_axis(rows.member, table_Rp, axis=1).reshape(num_layers, -1)
    device_P = np.repeat(np.arange(len(slots_D)), slots_D)
    load_LD = np.zeros((num_layers, len(slots_D)))
    np.add.at(load_LD, (np.arange(num_layers)[:, None], device_P), replica_loads(loads_LE, expert_LP))
    mean_L = loads_LE.sum(axis=1) / np.count_nonzero(slots_D)
    ratio_L = np.divide(load_LD.max(axis=1), mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    twice = (np.diff(expert_LP, axis=1) == 0) & (np.diff(device_P) == 0)
    return RawBalance(float(ratio_L.mean()), float(ratio_L.max()), int(twice.sum()))
