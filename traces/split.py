"""Splits of a trace into fitted and held-out tokens: by sample, by hash, the same everywhere.

Samples are the unit; a trace without samples splits by step, and one without either by blocks of consecutive rows.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .schema import TokenBatch

Unit = Literal["sample", "step", "block"]
BLOCK_ROWS = 64


def units(batch: TokenBatch, first_row: int, *, by_step: bool = False) -> NDArray[np.int64]:
    """The unit of each token, `[T]`; `first_row` is the batch's first row in the trace.

    `by_step`: where steps are recorded, they are the units.
    """
    if batch.sample is not None and not (by_step and batch.step is not None):
        return batch.sample
    if batch.step is not None:
        return batch.step.astype(np.int64)
    return (first_row + np.arange(len(batch), dtype=np.int64)) // BLOCK_ROWS


def with_units(
    batches: Iterable[TokenBatch], *, by_step: bool = False
) -> Iterator[tuple[TokenBatch, NDArray[np.int64]]]:
    """Batches of a trace, in order, each with the units of its tokens."""
    first_row = 0
    for batch in batches:
        yield batch, units(batch, first_row, by_step=by_step)
        first_row += len(batch)


def fitted(ids: NDArray[np.int64], *, seed: int, fraction: float, salt: str = "") -> NDArray[np.bool_]:
    """Mask of the units that are fitted, `[U]`; another `salt` splits anew.

    Notes
    -----
    A unit is fitted when the first 8 bytes, big-endian, of SHA-256 of "{salt}{seed}:{unit}" over 2^64 are below
    `fraction`. Of two units or more and a fraction below 1, the lowest hash is fitted and the highest is not.
    """
    hashes = [_hash64(f"{salt}{seed}:{unit}") for unit in ids.tolist()]
    fitted_U = np.array([one < fraction * 2.0**64 for one in hashes], dtype=np.bool_)
    if len(hashes) > 1 and fraction < 1:
        fitted_U[hashes.index(min(hashes))], fitted_U[hashes.index(max(hashes))] = True, False
    return fitted_U


def earliest(of: NDArray[np.bool_], fraction: float) -> NDArray[np.bool_]:
    """Mask of the first share of some units in their order, `[U]`: one at least, and not all, of two or more."""
    number = int(of.sum())
    few = min(max(round(fraction * number), 1), number - (fraction < 1 and number > 1))
    return np.asarray(of & (np.cumsum(of) <= few))


def mixed(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash sample ids by the mixing steps of SplitMix64: different for different ids, the same on every rank."""
    z = np.asarray(ids, np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
