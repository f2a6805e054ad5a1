"""Arrays of the solvers: their types, counts from a caller, checked, and real numbers as integers."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
EXACT = 2**40  # integers up to here stay what they are


def checked_counts(values: ArrayLike, what: str, shape: tuple[int | None, ...]) -> NDArray[np.float64]:
    """`values` as floats of this shape (None: any length from 1), finite, at least 0.

    Parameters
    ----------
    what
        Their name, for the message: "loads".

    Raises
    ------
    ValueError
        Another shape, an empty trailing axis, or values that are negative, not finite or too large to add up.
    """
    found = np.asarray(values)
    lengths = zip(shape, found.shape, strict=False)
    fits = found.ndim == len(shape) and all(m > 0 if n is None else m == n for n, m in lengths)
    if not fits or 0 in found.shape[1:] or found.dtype.kind not in "biuf":
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{what} of shape {list(found.shape)} and type {found.dtype}; expected numbers [{wanted}], no axis empty"
        )
    counts = found.astype(np.float64)
    largest = np.finfo(np.float64).max / (4 * max(1, counts.size))
    bad = counts[~((counts >= 0) & (counts <= largest))]
    if len(bad):
        raise ValueError(f"{what} contain {bad[0]}; expected numbers of at least 0 with a finite sum")
    return counts


def flow_units(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], float]:
    """Non-negative `values` times a scale, rounded up to integers, and the scale: 1 for integers up to `EXACT`."""
    largest = float(values.max(initial=0.0))
    if largest <= EXACT and (values == np.rint(values)).all():
        return values.astype(np.int64), 1.0
    scale = EXACT / max(largest, EXACT * np.finfo(np.float64).tiny)
    return np.ceil(values * scale).astype(np.int64), float(scale)
