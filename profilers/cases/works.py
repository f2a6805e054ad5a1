"""The work of every case that a profile may hold: of ours by the case, of all others by formula.

`top_k` copies of a token are sent or computed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UsageError
from ..series import ELEMENT_BYTES
from . import CASES

Work = Callable[[Mapping[str, Any]], Any]


def _moe(size: Mapping[str, Any]) -> Any:
    """Multiply-adds of a device's share of three products (gate, up, down) a token-expert pair."""
    macs = 3 * size["tokens"] * size["top_k"] * size["hidden"] * size["ffn"]
    return macs / (size["tp"] * size["ep"])


def _copies(dtype: str) -> Work:
    """Bytes of one hidden vector a token-expert pair."""
    return lambda size: size["tokens"] * size["top_k"] * size["hidden"] * ELEMENT_BYTES[dtype]


def _compared(size: Mapping[str, Any]) -> Any:
    """Multiply-adds of rows that are compared with those of their group."""
    return size["rows"] * size["group"] * size["hidden"]


WORKS: Mapping[str, Work] = {
    "condensed_rows": _compared,  # a case of `runtime`, whose compute profilers do not know
    "moe": _moe,
    "deepep_dispatch": _copies("fp8"),
    "deepep_combine": _copies("bf16"),
    "deepep_ll_dispatch": _copies("fp8"),
    "deepep_ll_combine": _copies("bf16"),
}


def work_of(case: str, size: Mapping[str, NDArray[Any]], ranks: int) -> NDArray[np.float64]:
    """Units of work of a rank at sizes given as arrays, in floating point: products of large sizes do not overflow."""
    columns = {axis: column.astype(np.float64) for axis, column in size.items()}
    if case not in CASES and case not in WORKS:
        raise UsageError(f"case {case!r} counts no work; expected {', '.join((*CASES, *WORKS))}")
    of_case: Any = CASES[case].work if case in CASES else None  # plain arithmetic, for arrays as for integers
    try:
        with np.errstate(all="ignore"):  # a size of 0 devices; what predicts from it looks at the seconds
            work = of_case(columns, ranks) if of_case else WORKS[case](columns)
    except KeyError as error:
        raise InputError(f"sizes of {case} over {', '.join(size)} lack {error.args[0]}; measure it again") from error
    return np.asarray(work, dtype=np.float64)
