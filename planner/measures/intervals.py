"""95 % bootstrap intervals, paired: every figure of a part is resampled with the same draws.

Legend: U units (samples) or steps; C columns to sum; R draws; S sources of seconds; Q levels of a source's curves
(low, middle, high).
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAWS", "interval", "resampled_sums"]

DRAWS = 1000


def resampled_sums(values_UC: NDArray[np.number], *, seed: int) -> NDArray[np.float64]:
    """Column sums over R resamplings of the rows, `[R, C]`; of a single row itself, R = 1: nothing varies there.

    Notes
    -----
    Draw r takes `rng.integers(U, size=U)`, the r-th such call on `numpy.random.default_rng(seed)`; figures computed
    from the same number of rows under the same seed are therefore paired.
    """
    rng = np.random.default_rng(seed)
    num_rows = len(values_UC)
    if num_rows == 1:
        return values_UC.astype(np.float64)
    sums_RC = np.empty((DRAWS, values_UC.shape[1]))
    for row_C in sums_RC:
        times_U = np.bincount(rng.integers(num_rows, size=num_rows), minlength=num_rows)
        row_C[:] = times_U @ values_UC
    return sums_RC


def interval(figure: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The 2.5 % and 97.5 % quantiles of a resampled figure; None for both where it is undefined.

    Parameters
    ----------
    figure
        `[R]`; or the summands of each source at each level, `[S, Q, R]`; of a single unit or step with R = 1.

    Notes
    -----
    What is known of a source's error is that its curves may be low, or high, together. Another source's may be the
    other way at the same time, hence, with one level a source,

        low  = 2.5 % quantile over r of   sum_s min_q figure[s, q, r]
        high = 97.5 % quantile over r of  sum_s max_q figure[s, q, r]

    A single unit, or step without any error of its curves, has no interval: nothing is known of its width.
    """
    summands_SQR = figure if figure.ndim == 3 else figure[None, None]
    low_R, high_R = summands_SQR.min(axis=1).sum(axis=0), summands_SQR.max(axis=1).sum(axis=0)
    low_R, high_R = low_R[np.isfinite(low_R)], high_R[np.isfinite(high_R)]
    if not len(low_R) or (summands_SQR.shape[2] == 1 and low_R[0] == high_R[0]):
        return None, None
    return float(np.quantile(low_R, 0.025)), float(np.quantile(high_R, 0.975))
