"""Rules that every token of a trace must satisfy, checked alike where it is written and where it is read.

Legend: T tokens; L MoE layers; K experts a token.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .model import NOT_ROUTED
from .schema import PHASES, TokenBatch

__all__ = ["check_counts", "check_tokens"]

FLOAT16_EXPONENT = 0x7C00  # all exponent bits set: infinite or NaN


def check_tokens(batch: TokenBatch, num_experts: int, first_row: int) -> None:
    """Hold the values of a batch against the rules of a trace.

    Parameters
    ----------
    first_row
        The batch's first row, for the message.

    Raises InputError where an expert id is neither below `num_experts` nor 65535, a weight is not finite, a position is
    negative, or a phase is unknown.
    """
    for layer in range(batch.ids.shape[1]):
        ids_TK = batch.ids[:, layer]
        if ids_TK.size and ids_TK.max() >= num_experts:
            wrong_TK = (ids_TK >= num_experts) & (ids_TK != NOT_ROUTED)
            expert = ids_TK[wrong_TK][0] if wrong_TK.any() else None
            expected = f"expected 0 to {num_experts - 1}, or {NOT_ROUTED} for not routed"
            _refuse_where(wrong_TK, f"goes to expert {expert} in layer {layer}; {expected}", first_row)
        if batch.weights is not None:
            _refuse_where(
                batch.weights[:, layer].view(np.uint16) & FLOAT16_EXPONENT == FLOAT16_EXPONENT,
                f"has a weight in layer {layer} that is not finite; expected a number",
                first_row,
            )
    _refuse_where(batch.position < 0, "has a negative position; expected 0 or more", first_row)
    _refuse_where(
        (batch.phase < 0) | (batch.phase >= len(PHASES)),
        f"has no phase; expected one of {', '.join(PHASES)}",
        first_row,
    )


def check_counts(layer: NDArray[np.int32], counts: NDArray[np.int64], num_layers: int) -> None:
    """Hold rows of the count form against its rules: layers `[R]` of the model, counts `[R, E]` of at least 0."""
    _refuse_where((layer < 0) | (layer >= num_layers), f"names a layer outside 0 to {num_layers - 1}", 0)
    _refuse_where(counts < 0, "has a negative count; expected 0 or more", 0)


def _refuse_where(wrong: NDArray[Any], what: str, first_row: int) -> None:
    if wrong.any():
        row = first_row + int(np.argwhere(wrong)[0][0])
        raise InputError(f"row {row} {what}")
