"""The two stages of NetMoE, each an exact transportation problem: samples to nodes, then to devices inside each.

Legend: I samples; D devices; N nodes; G devices a node.
"""

import numpy as np
from numpy.typing import NDArray

from ..assignment import Method, balanced_assignment

__all__ = ["one_stage", "two_stages"]

Units = NDArray[np.int64]


def two_stages(units: Units, capacity: Units, devices_per_node: int, method: Method = "transport") -> NDArray[np.int64]:
    """The device of every sample `[I]`: as little as possible between nodes, then between the devices of each.

    Parameters
    ----------
    units
        `Traffic.units`, `[I, D]`.
    capacity
        The most samples a device takes, `[D]`.
    method
        Of `assignment.balanced_assignment`.

    Notes
    -----
    With t[i, d] the copies of sample i with device d, Eq. 8 and 10 (each for one exchange or the sum of both) are

        c[i, n]  = sum_{d not on n} t[i, d]              over the nodes, at most sum_{d on n} capacity[d] samples    (1)
        c'[i, d] = sum_{e on the node of d} t[i, e] - t[i, d]    over the devices of its node, capacity[d] samples   (2)

    Each stage is optimal, the second given the first; the sum of both is not, which `one_stage` is.
    """
    num_devices = units.shape[1]
    on_node_IN = units.reshape(len(units), -1, devices_per_node).sum(axis=2)
    room_N = capacity.reshape(-1, devices_per_node).sum(axis=1)
    node_I = balanced_assignment(on_node_IN.sum(axis=1, keepdims=True) - on_node_IN, room_N, method)  # (1)
    device_I = node_I * devices_per_node
    if devices_per_node == 1:
        return device_I
    for first in range(0, num_devices, devices_per_node):
        here, there = np.flatnonzero(node_I == first // devices_per_node), slice(first, first + devices_per_node)
        near_IG = units[here, there]
        cost_IG = near_IG.sum(axis=1, keepdims=True) - near_IG
        device_I[here] += balanced_assignment(cost_IG, capacity[there], method)  # (2)
    return device_I


def one_stage(
    units: Units, capacity: Units, devices_per_node: int, ratio: float, method: Method = "transport"
) -> NDArray[np.int64]:
    """The device of every sample `[I]` for the least c' + ratio c over both stages at once: exact too, D sinks.

    Parameters
    ----------
    ratio
        What a copy between nodes costs, in copies inside a node.
    """
    on_node_IN = units.reshape(len(units), -1, devices_per_node).sum(axis=2)
    near_ID = np.repeat(on_node_IN, devices_per_node, axis=1)
    far_ID = units.sum(axis=1, keepdims=True) - near_ID
    return balanced_assignment(ratio * far_ID + (near_ID - units), capacity, method)
