"""The work of every case that a profile may hold: of ours by the case, of kernels that only tables measure by formula.

`top_k` copies of a token are sent or computed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..cases import CASES

__all__ = ["work_of"]

Work = Callable[[Mapping[str, Any]], Any]
FP8_BYTES, BF16_BYTES = 1, 2


def _moe(size: Mapping[str, Any]) -> Any:
    """Multiply-adds of a device's share of three products (gate, up, down) a token-expert pair."""
    macs = 3 * size["tokens"] * size["top_k"] * size["hidden"] * size["ffn"]
    return macs / (size["tp"] * size["ep"])


def _copies(element_bytes: int) -> Work:
    """Bytes of one hidden vector a token-expert pair."""
    return lambda size: size["tokens"] * size["top_k"] * size["hidden"] * element_bytes


WORKS: Mapping[str, Work] = {
    "moe": _moe,
    "deepep_dispatch": _copies(FP8_BYTES),
    "deepep_combine": _copies(BF16_BYTES),
    "deepep_ll_dispatch": _copies(FP8_BYTES),
    "deepep_ll_combine": _copies(BF16_BYTES),
}


def work_of(case: str, size: Mapping[str, NDArray[Any]], ranks: int) -> NDArray[np.float64]:
    """Units of work of a rank at sizes given as arrays, in floating point: products of large sizes do not overflow."""
    columns = {axis: column.astype(np.float64) for axis, column in size.items()}
    if case in CASES:
        of_case: Any = CASES[case].work  # plain arithmetic, for arrays as for integers
        return np.asarray(of_case(columns, ranks), dtype=np.float64)
    if case in WORKS:
        return np.asarray(WORKS[case](columns), dtype=np.float64)
    raise UsageError(f"case {case!r} counts no work; expected {', '.join((*CASES, *WORKS))}")
