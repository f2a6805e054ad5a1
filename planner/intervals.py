"""95 % bootstrap intervals, paired: every figure of a part is resampled with the same draws.

Legend: U units (samples) or steps; C columns to sum; R draws.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAWS", "interval", "resampled_sums"]

DRAWS = 1000


def resampled_sums(values_UC: NDArray[np.number], *, seed: int) -> NDArray[np.float64]:
    """Column sums over R resamplings of the rows, `[R, C]`.

    Notes
    -----
    Draw r takes `rng.integers(U, size=U)`, the r-th such call on `numpy.random.default_rng(seed)`; figures computed
    from the same number of rows under the same seed are therefore paired.
    """
    rng = np.random.default_rng(seed)
    num_rows = len(values_UC)
    sums_RC = np.empty((DRAWS, values_UC.shape[1]))
    for row_C in sums_RC:
        times_U = np.bincount(rng.integers(num_rows, size=num_rows), minlength=num_rows)
        row_C[:] = times_U @ values_UC
    return sums_RC


def interval(figures_R: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The 2.5 % and 97.5 % quantiles of a resampled figure; None for both where it is undefined."""
    finite_R = figures_R[np.isfinite(figures_R)]
    if not len(finite_R):
        return None, None
    low, high = np.quantile(finite_R, [0.025, 0.975])
    return float(low), float(high)
