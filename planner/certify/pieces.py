"""The pieces that both passes make of a pipelined layer: the naive twin of `planner.pipeline.cut`."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.decisions import SHARE_DIGITS, PipelineDecision

__all__ = ["Parts", "Pass", "Span", "buffered", "passes_of", "share_of", "whole"]


class Span(NamedTuple):
    """A piece from one share of a layer's rows to another, where chunks are unequal; of so many in all."""

    start: float
    end: float
    of: int


Parts = tuple[Fraction | Span, ...]  # the pieces of a chunk
Pass = Sequence[Sequence[Parts]]  # of every layer, its chunks


def passes_of(decision: PipelineDecision, name: str) -> tuple[Pass, Pass | None]:
    """The chunks of every layer, forward and backward, of a contender of that name."""
    one = decision.shares or decision
    layers: tuple[Sequence[int | Sequence[float]], ...] = (one.forward, one.backward or one.forward)
    both = [*zip(*layers, strict=True)]
    try:
        forward = [_chunks(there, back) for there, back in both]
        return forward, None if one.backward is None else [_chunks(back, there) for there, back in both]
    except CertificationError as error:
        raise CertificationError(f"degrees of {name}: {error}") from error


def share_of(parts: Parts) -> Fraction | float:
    """What a chunk is of its layer."""
    return sum((x if isinstance(x, Fraction) else x.end - x.start for x in parts), start=Fraction())


def whole(rows: NDArray[Any], parts: Parts) -> NDArray[np.int64]:
    """A chunk's share of rows in whole ones; where it is no fraction, up to its rounding."""
    share = share_of(parts)
    if isinstance(share, Fraction):
        return -(-rows.astype(np.int64) * share.numerator // share.denominator)
    return np.ceil(np.round(rows * share, SHARE_DIGITS)).astype(np.int64)


def buffered(rows: NDArray[Any], parts: Parts) -> NDArray[np.int64]:
    """What a chunk has of a buffer of so many rows, padded to a multiple of the pieces."""
    found = np.zeros(rows.shape, np.int64)
    for x in parts:
        if isinstance(x, Fraction):
            found += whole(rows, (x,))
        else:
            padded = np.ceil(rows / x.of) * x.of
            start, end = (np.rint(round(share, SHARE_DIGITS) * padded) for share in (x.start, x.end))
            found += (end - start).astype(np.int64)
    return found


def _chunks(own: int | Sequence[float], other: int | Sequence[float]) -> list[Parts]:
    """The chunks of a layer in the pieces that the other pass's boundaries leave, by their number or their shares."""
    if isinstance(own, int) and isinstance(other, int):
        pieces = max(own, other)
        if pieces % min(own, other):
            raise CertificationError(f"{own} and {other} chunks of a layer, of which neither number divides the other")
        return [(Fraction(1, pieces),) * (pieces // own)] * own
    assert not isinstance(own, int)
    assert not isinstance(other, int)
    ends, inner = ([*(round(end, SHARE_DIGITS) for end in accumulate(one[:-1])), 1.0] for one in (own, other))
    chunks: list[Parts] = []
    for start, end in pairwise([0.0, *ends]):
        marks = [start, *(x for x in inner if start < x < end), end]
        chunks.append(tuple(Span(a, b, max(len(own), len(other))) for a, b in pairwise(marks)))
    widths = [[round(float(share_of((x,))), SHARE_DIGITS - 1) for x in chunk] for chunk in chunks]
    if len({*map(len, widths)}) > 1 or any(len({*one}) > 1 for one in widths):
        raise CertificationError("passes that cut each other's chunks unevenly")
    return chunks
