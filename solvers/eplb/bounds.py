"""Bounds on the busiest device's load: no placement of a row is below.

Legend: R rows of e experts on G devices.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["lowest_max"]


def lowest_max(load: NDArray[np.float64], slots: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean device load of rows, or the least that the largest replica can have, if that is more, `[R]`.

    Giving every surplus slot to the expert with the highest load a replica, as long as it has fewer than there are
    devices, makes the largest replica smallest.
    """
    row_R, used = np.arange(len(load)), int(np.count_nonzero(slots))
    replica_Re, count_Re = load.copy(), np.ones(load.shape)
    for _ in range(int(slots.sum()) - load.shape[1]):
        chosen_R = replica_Re.argmax(axis=1)
        count_R = np.minimum(count_Re[row_R, chosen_R] + 1, used)
        count_Re[row_R, chosen_R] = count_R
        replica_Re[row_R, chosen_R] = load[row_R, chosen_R] / count_R
    return np.asarray(np.maximum(load.sum(axis=1) / used, replica_Re.max(axis=1)))
