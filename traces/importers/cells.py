"""The cells of a foreign recording as a trace has them: ids with 65535 for not routed, choices by descending weight.

Legend: T tokens; L MoE layers; K experts per token.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..model import NOT_ROUTED
from ..schema import MAX_COUNT

UNORDERED = "no gate weights: a token's experts stay in the engine's order, the first taken as its highest"


def expert_ids(raw: NDArray[Any]) -> NDArray[np.uint16]:
    """Ids as a trace has them, where -1 stands for not routed as 65535 does; InputError where one is out of range."""
    if raw.dtype == np.uint8:
        return raw.astype(np.uint16)
    low, high = int(raw.min()), int(raw.max())
    if low < -1 or high > NOT_ROUTED:
        raise InputError(f"expert id {low if low < -1 else high}; expected 0 to {NOT_ROUTED - 1}, or -1 for not routed")
    return raw.astype(np.int32).astype(np.uint16)


def check_counted(counts: NDArray[Any], what: str) -> None:
    """Refuse counts of which one is negative, or so large that they could not be added up."""
    low, high = int(counts.min()), int(counts.max())
    if low < 0 or high > MAX_COUNT:
        raise InputError(f"{what}: count {low if low < 0 else high}; expected 0 to {MAX_COUNT:,}")


def largest(ids: NDArray[np.uint16]) -> int:
    """The largest expert id, -1 where nothing is routed."""
    routed = ids[ids != NOT_ROUTED]
    return int(routed.max()) if routed.size else -1


def repeated(ids_TLK: NDArray[np.uint16]) -> int:
    """Number of cells that name an expert twice."""
    ascending_TLK = np.sort(ids_TLK, axis=-1)
    first, second = ascending_TLK[..., :-1], ascending_TLK[..., 1:]
    return int(((first == second) & (first != NOT_ROUTED)).any(-1).sum())


def gates(raw: NDArray[Any]) -> NDArray[np.float16]:
    """Gate weights as a trace has them; what float16 cannot hold is infinite, which no trace takes."""
    with np.errstate(over="ignore"):
        return raw.astype(np.float16)


def by_weight(
    ids_TLK: NDArray[np.uint16], weights_TLK: NDArray[np.float16]
) -> tuple[NDArray[np.uint16], NDArray[np.float16], int]:
    """Each cell's choices by descending weight, ties as they were, and how many cells were not in that order."""
    if not (unordered_TL := _is_unordered(weights_TLK)).any():
        return ids_TLK, weights_TLK, 0
    order_TLK = np.argsort(-weights_TLK, axis=-1, kind="stable")
    ids_TLK, weights_TLK = np.take_along_axis(ids_TLK, order_TLK, -1), np.take_along_axis(weights_TLK, order_TLK, -1)
    return ids_TLK, weights_TLK, int(unordered_TL.sum())


def _is_unordered(weights_TLK: NDArray[np.float16]) -> NDArray[np.bool_]:
    """Mask of cells whose weights rise anywhere, `[T, L]`; non-negative float16 compare as their bits, much faster."""
    bits = weights_TLK.view(np.int16)
    values = weights_TLK if bits.min() < 0 else bits
    return np.asarray((values[..., 1:] > values[..., :-1]).any(-1))
