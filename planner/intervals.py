"""95 % bootstrap intervals, paired: every figure of a part is resampled with the same draws.

Legend: U units (samples) or steps; C columns to sum; R draws; Q levels (low, middle and high
curves).
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
    """The 2.5 % and 97.5 % quantiles of a resampled figure; None for both where it is undefined.

    Of a figure at several levels, `[Q, R]`, the widest: the least of the low and the largest of the high quantiles.
    """
    found = [
        np.quantile(row, [0.025, 0.975])
        for row in np.atleast_2d(figures_R)
        for row in [row[np.isfinite(row)]]
        if len(row)
    ]
    if not found:
        return None, None
    return float(min(low for low, _ in found)), float(max(high for _, high in found))
