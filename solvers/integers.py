"""Real numbers as integers, which min-cost flow adds without rounding."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["flow_units"]

EXACT = 2**40  # integers up to here stay what they are


def flow_units(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], float]:
    """Non-negative `values` times a scale, rounded up to integers, and the scale: 1 for integers up to `EXACT`."""
    largest = float(values.max(initial=0.0))
    if largest <= EXACT and (values == np.rint(values)).all():
        return values.astype(np.int64), 1.0
    scale = EXACT / max(largest, EXACT * np.finfo(np.float64).tiny)
    return np.ceil(values * scale).astype(np.int64), float(scale)
