"""The exact split of a step over replicas, by a linear programme over every expert and holder."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog


def least_load(held_ED: NDArray[np.bool_], total_E: Any) -> int:
    """The load of the busiest device, of whole pairs, at the best split of each expert's pairs over its holders."""
    cells = np.argwhere(held_ED)
    served, load = (np.zeros((size, len(cells) + 1)) for size in held_ED.shape)
    served[cells[:, 0], np.arange(len(cells))] = load[cells[:, 1], np.arange(len(cells))] = 1
    load[:, -1] = -1
    most = linprog(np.eye(len(cells) + 1)[-1], load, np.zeros(len(load)), served, total_E).fun
    return int(np.ceil(most - 1e-6))


def split_ratios(held_LED: NDArray[np.bool_], loads_BLE: NDArray[np.integer]) -> NDArray[np.float64]:
    """The same over the mean of devices that hold something, of every step and layer, `[B, L]`."""
    ratios = np.ones(loads_BLE.shape[:2])
    for step, layer in np.ndindex(*ratios.shape):
        used = held_LED[layer].any(axis=0)
        total = loads_BLE[step, layer]
        if total.any():
            ratios[step, layer] = least_load(held_LED[layer][:, used], total) * used.sum() / total.sum()
    return ratios
