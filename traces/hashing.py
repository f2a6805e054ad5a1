"""A hash of sample ids that every rank, layer and run computes alike."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["mixed"]


def mixed(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The mixing steps of SplitMix64: as good as random, different for different ids."""
    z = np.asarray(ids, np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
