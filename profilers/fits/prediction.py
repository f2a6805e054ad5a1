"""A prediction: seconds at sizes, with the fit's error as an interval."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Prediction"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds at one or many sizes; arrays of one shape.

    Parameters
    ----------
    seconds
        Of the fitted model.
    low, high
        Where sizes held out from the fit lay around it: 95 % of them, or the range of fewer than 39 (`interval`); equal
        to `seconds` where none could be held out.
    extrapolated
        Whether each size lies outside those measured, along an axis or in work.
    """

    seconds: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]
