"""Loads by step, sample or source rank: how many tokens of each went to each expert.

Legend: T tokens; L MoE layers; E experts; K experts a token; G groups (steps, samples, ...); B columns that tell
them apart.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .count_rows import CountRows
from .distinct import distinct_rows
from .reader import Trace
from .schema import Key, TokenBatch

__all__ = ["Loads", "batch_loads", "grouped_loads"]


@dataclass(frozen=True, slots=True)
class Loads:
    """Tokens that go to an expert, by group.

    Parameters
    ----------
    keys
        int64 `[G, B]`: what tells the groups apart.
    loads
        int64 `[G, L, E]`.
    """

    keys: NDArray[np.int64]
    loads: NDArray[np.int64]


def grouped_loads(trace: Trace, by: Sequence[Key], *, phases: Collection[str] | None = None) -> Iterator[Loads]:
    """The loads of groups of tokens in bounded memory: whenever 64 MiB are full, what was counted comes out.

    The same group may come out again; its loads then add up.

    Parameters
    ----------
    by
        The columns that tell groups apart; empty: one group.

    Raises
    ------
    UsageError
        The trace lacks such a column.
    """
    if missing := set(by) - trace.known:
        raise UsageError(f"{trace.path}: no column {', '.join(sorted(missing))} was recorded; it cannot be grouped by")
    num_experts = trace.model.num_experts
    rows = CountRows(len(by), (trace.model.num_layers, num_experts))
    for batch in trace.batches(phases=phases):
        for piece in batch_loads(batch, by, num_experts, most=rows.most):
            for full in rows.add(piece.keys, piece.loads):
                yield Loads(*full)
    yield Loads(*rows.taken())


def batch_loads(batch: TokenBatch, by: Sequence[Key], num_experts: int, *, most: int) -> Iterator[Loads]:
    """The loads of the groups in a batch, at most `most` groups at a time; a group may come out again."""
    columns = [np.asarray(getattr(batch, name), np.int64) for name in by]
    key_TB = np.stack(columns, axis=1) if columns else np.zeros((len(batch), 0), np.int64)
    keys_GB, group_T = distinct_rows(key_TB)
    if len(keys_GB) > most:
        middle = len(batch) // 2
        for half in (slice(middle), slice(middle, None)):
            yield from batch_loads(batch.select(half), by, num_experts, most=most)
        return
    loads_GLE = np.empty((len(keys_GB), batch.ids.shape[1], num_experts), np.int64)
    for layer in range(batch.ids.shape[1]):
        loads_GLE[:, layer] = _loads(batch.ids[:, layer], group_T, len(keys_GB), num_experts)
    yield Loads(keys_GB, loads_GLE)


def _loads(
    ids_TK: NDArray[np.uint16], group_T: NDArray[np.intp], num_groups: int, num_experts: int
) -> NDArray[np.int64]:
    """`[G, E]`; not routed is counted as an expert more and cut off."""
    size = num_experts + 1
    cell_TK = group_T[:, None] * size + np.minimum(ids_TK, num_experts)
    return np.bincount(cell_TK.reshape(-1), minlength=num_groups * size).reshape(num_groups, size)[:, :-1]
