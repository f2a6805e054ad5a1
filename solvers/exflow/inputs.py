"""The inputs of a solve, checked: transitions, loads.

Legend: L MoE layers; E experts a layer.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["checked_loads", "checked_transitions"]


def checked_transitions(transitions: ArrayLike) -> NDArray[np.float64]:
    """Transitions `[L-1, E, E]` as floats.

    Raises
    ------
    ValueError
        Wrong shape, or values that are negative, not finite or too large to add up.
    """
    found = np.asarray(transitions)
    if found.ndim != 3 or found.shape[1] != found.shape[2] or found.shape[1] < 1 or found.dtype.kind not in "biuf":
        raise ValueError(
            f"transitions of shape {list(found.shape)} and type {found.dtype};"
            " expected numbers [layers - 1, experts, experts]"
        )
    return _counts(found, "transitions")


def checked_loads(loads: ArrayLike | None, transitions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads `[L, E]` as floats; where none are given, the transitions that leave each expert (last layer: enter it).

    Raises
    ------
    ValueError
        As for transitions.
    """
    num_cuts, num_experts, _ = transitions.shape
    if loads is None:
        if not num_cuts:
            return np.ones((1, num_experts))
        return np.concatenate([transitions.sum(axis=2), transitions[-1:].sum(axis=1)])
    found = np.asarray(loads)
    if found.shape != (num_cuts + 1, num_experts) or found.dtype.kind not in "biuf":
        raise ValueError(
            f"loads of shape {list(found.shape)} and type {found.dtype}; expected numbers"
            f" [{num_cuts + 1}, {num_experts}], as the transitions have them"
        )
    return _counts(found, "loads")


def _counts(found: NDArray[np.generic], what: str) -> NDArray[np.float64]:
    counts = found.astype(np.float64)
    if not np.isfinite(counts).all() or (counts < 0).any():
        bad = counts[~np.isfinite(counts) | (counts < 0)][0]
        raise ValueError(f"{what} contain {bad}; expected finite numbers of at least 0")
    if counts.size and counts.max() > np.finfo(np.float64).max / (4 * counts.size):
        raise ValueError(f"{what} up to {counts.max()}; their sum is not finite")
    return counts
