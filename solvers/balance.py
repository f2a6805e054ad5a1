"""How evenly a placement spreads its loads when every expert's replicas share alike.

Legend: L MoE layers; E experts a layer; P slots a layer; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from .placement import Placement

__all__ = ["balance", "replica_loads"]


def balance(loads: NDArray[np.float64], placement: Placement) -> float:
    """The mean over layers of the busiest device's load over the mean of devices that have slots; 1 without load."""
    load_LD = _device_loads(loads, placement)[:, placement.slots > 0]
    mean_L = load_LD.mean(axis=1)
    ratio_L = np.divide(load_LD.max(axis=1), mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return float(ratio_L.mean())


def replica_loads(loads: NDArray[np.float64], experts: NDArray[np.integer]) -> NDArray[np.float64]:
    """The load of every replica `[L, P]`, for loads `[L, E]` and the expert in every slot `[L, P]`."""
    num_layers, num_experts = loads.shape
    cell_LP = np.arange(num_layers)[:, None] * num_experts + experts
    count_N = np.bincount(cell_LP.ravel(), minlength=loads.size)
    return np.asarray((loads.ravel() / np.maximum(count_N, 1))[cell_LP])


def _device_loads(loads: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """The load of every device `[L, D]` for loads `[L, E]`."""
    load_LD = np.zeros((placement.num_layers, placement.num_devices))
    layer = np.arange(placement.num_layers)[:, None]
    np.add.at(load_LD, (layer, placement.device_of_slot), replica_loads(loads, placement.physical_to_logical))
    return load_LD
