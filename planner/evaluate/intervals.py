"""95 % bootstrap intervals, paired: every figure of a part is resampled with the same draws.

Legend: U units or steps; C columns to sum; R draws, and the part itself before them; Q levels of a source's curves
(low, middle, high).
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["DRAWS", "Summands", "difference", "drawn", "interval", "resampled_sums"]

DRAWS = 1000
BLOCK = 64  # draws at a time, so that their weights stay small

# What each source of error adds to a figure: its levels, over the part itself and its draws, `[Q, R]`.
Summands = Mapping[str, NDArray[np.float64]]


def resampled_sums(values_UC: NDArray[np.number], *, seed: int) -> NDArray[np.float64]:
    """Column sums over the rows, then over 1,000 resamplings of them, `[1 + R, C]`; of a single row the sums alone.

    Notes
    -----
    Draw r takes `rng.integers(U, size=U)`, the r-th such call on `numpy.random.default_rng(seed)`; figures computed
    from the same number of rows under the same seed are therefore paired. Cost: R U C multiplications.
    """
    values_UC = np.asarray(values_UC, np.float64)
    num_rows = len(values_UC)
    own_C: NDArray[np.float64] = np.asarray(values_UC.sum(axis=0))
    if num_rows == 1:
        return own_C.reshape(1, -1)
    rng, sums = np.random.default_rng(seed), [own_C[None]]
    for first in range(0, DRAWS, BLOCK):
        block = min(BLOCK, DRAWS - first)
        times_RU = np.empty((block, num_rows))
        for times_U in times_RU:
            times_U[:] = np.bincount(rng.integers(num_rows, size=num_rows), minlength=num_rows)
        sums.append(np.asarray(times_RU @ values_UC, np.float64))
    return np.concatenate(sums)


def drawn(summands: Summands) -> bool:
    """Whether a figure was resampled."""
    return any(levels_QR.shape[1] > 1 for levels_QR in summands.values())


def difference(ours: Summands, theirs: Summands) -> Summands:
    """How much less we have than they, source by source and level by level; a source that one lacks adds nothing."""
    nothing = np.zeros((1, 1))
    return {source: theirs.get(source, nothing) - ours.get(source, nothing) for source in {**ours, **theirs}}


def interval(summands: Summands) -> tuple[float | None, float | None]:
    """The 2.5 % and 97.5 % quantiles of a resampled figure; None for both where it is undefined.

    Notes
    -----
    Fit errors are fully correlated within a source and independent between sources, hence, with one level per source,

        low  = 2.5 % quantile over the draws of   sum_s min_q summands[s][q]
        high = 97.5 % quantile over the draws of  sum_s max_q summands[s][q]

    A single unit, or step without any error of its curves, has no interval: nothing is known of its width.
    """
    drawn_QR = [levels_QR[:, 1:] if levels_QR.shape[1] > 1 else levels_QR for levels_QR in summands.values()]
    low_R, high_R = np.zeros(1), np.zeros(1)
    for levels_QR in drawn_QR:
        low_R, high_R = low_R + levels_QR.min(axis=0), high_R + levels_QR.max(axis=0)
    low_R, high_R = low_R[np.isfinite(low_R)], high_R[np.isfinite(high_R)]
    if not len(low_R) or (not drawn(summands) and low_R[0] == high_R[0]):
        return None, None
    return float(np.quantile(low_R, 0.025)), float(np.quantile(high_R, 0.975))
