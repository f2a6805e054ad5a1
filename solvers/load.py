"""How uneven loads are."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["max_over_mean"]


def max_over_mean(loads: NDArray[np.float64], axis: int = -1, *, idle: float = 1.0) -> NDArray[np.float64]:
    """The largest load along an axis, of devices, over the mean along it; `idle` where all are 0.

    Parameters
    ----------
    loads
        At least 0. All along the axis count: leave devices away that have no slots.
    """
    mean = loads.mean(axis=axis)
    return np.asarray(np.divide(loads.max(axis=axis), mean, out=np.full(mean.shape, idle), where=mean > 0))
