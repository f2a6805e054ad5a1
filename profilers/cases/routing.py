"""Routing as cases draw it: experts of unequal popularity, the same on all ranks.

Legend: D ranks; E experts of a rank; P token-expert pairs.
"""

import functools

import numpy as np
from numpy.typing import NDArray

SEED = 0
SIGMA = 0.5  # of the popularities' logarithm: of 4 ranks with 4 experts each the busiest has 1.3 times the mean


@functools.cache
def popularity_DE(num_ranks: int, experts: int) -> NDArray[np.float64]:  # noqa: N802  the shape
    """The share of all token-expert pairs that goes to each expert, `[D, E]`: log-normal, summing to 1."""
    weight_DE = np.exp(SIGMA * np.random.default_rng(SEED).standard_normal((num_ranks, experts)))
    return np.asarray(weight_DE / weight_DE.sum())


def pairs_DE(num_ranks: int, experts: int, busiest: int) -> NDArray[np.int64]:  # noqa: N802  the shape
    """Token-expert pairs of each expert, `[D, E]`, of which the busiest rank has `busiest`.

    Notes
    -----
    With p the popularities, the fractions p_de busiest / max over d of sum_e p_de are rounded down along each rank's
    cumulative sum, so that a rank's pairs add up to its own share.
    """
    share_DE = popularity_DE(num_ranks, experts)
    upto_DE = np.floor(share_DE.cumsum(axis=1) / share_DE.sum(axis=1).max() * busiest + 1e-6).astype(np.int64)
    return np.asarray(np.diff(upto_DE, axis=1, prepend=0))
