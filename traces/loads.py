"""Loads by step, sample or source rank: how many tokens of each went to each expert.

Legend: T tokens; L layers asked for; E experts; K experts a token; G groups (steps, samples, ...); B columns that tell
them apart.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .reader import Trace
from .schema import Key, TokenBatch

__all__ = ["Loads", "batch_loads", "grouped_loads", "loads_by"]

GROUPS_BYTES = 64 * 2**20
MAX_LOADS_BYTES = 4 * 2**30


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


def loads_by(
    trace: Trace, by: Key, *, layers: Sequence[int] | None = None, phases: Collection[str] | None = None
) -> Loads:
    """The loads of every step, sample or source rank, by ascending key; `loads[:, l]` is samples x experts of a layer.

    Raises
    ------
    UsageError
        The trace lacks the column, or the loads would pass 4 GiB: ask for fewer layers.
    """
    rows: dict[int, int] = {}
    table = np.zeros((0, 0, 0), np.int64)
    for part in grouped_loads(trace, (by,), layers=layers, phases=phases):
        keys_G = part.keys[:, 0].tolist()
        for key in keys_G:
            rows.setdefault(key, len(rows))
        if len(rows) > len(table):
            table = _grown(table, len(rows), part.loads.shape[1:])
        table[[rows[key] for key in keys_G]] += part.loads
    keys = np.array(list(rows), dtype=np.int64)
    order = np.argsort(keys)
    return Loads(keys[order, None], table[order])


def grouped_loads(
    trace: Trace,
    by: Sequence[Key],
    *,
    layers: Sequence[int] | None = None,
    phases: Collection[str] | None = None,
) -> Iterator[Loads]:
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
    num_layers = trace.model.num_layers if layers is None else len(layers)
    most = max(1, GROUPS_BYTES // (8 * max(1, num_layers) * trace.model.num_experts))
    rows: dict[tuple[int, ...], int] = {}
    table = np.zeros((most, num_layers, trace.model.num_experts), np.int64)
    for batch in trace.batches(layers, phases=phases):
        for piece in batch_loads(batch, by, trace.model.num_experts, most=most):
            keys = list(map(tuple, piece.keys.tolist()))
            if len(rows.keys() | keys) > most:
                yield _taken(rows, table, len(by))
                rows, table = {}, np.zeros_like(table)
            table[[rows.setdefault(key, len(rows)) for key in keys]] += piece.loads
    yield _taken(rows, table, len(by))


def batch_loads(batch: TokenBatch, by: Sequence[Key], num_experts: int, *, most: int) -> Iterator[Loads]:
    """The loads of the groups in a batch, at most `most` groups at a time; a group may come out again."""
    keys_GB, group_T = _groups(batch, by)
    if len(keys_GB) > most:
        middle = len(batch) // 2
        for half in (slice(middle), slice(middle, None)):
            yield from batch_loads(batch.select(half), by, num_experts, most=most)
        return
    loads_GLE = np.empty((len(keys_GB), batch.ids.shape[1], num_experts), np.int64)
    for layer in range(batch.ids.shape[1]):
        loads_GLE[:, layer] = _loads(batch.ids[:, layer], group_T, len(keys_GB), num_experts)
    yield Loads(keys_GB, loads_GLE)


def _groups(batch: TokenBatch, by: Sequence[Key]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The distinct keys in a batch `[G, B]`, and the group of each token `[T]`."""
    if not by:
        return np.zeros((1, 0), np.int64), np.zeros(len(batch), np.intp)
    columns = [np.unique(getattr(batch, name), return_inverse=True) for name in by]
    code_T = columns[0][1]
    for values, place_T in columns[1:]:
        code_T = code_T * len(values) + place_T
    _, first_G, group_T = np.unique(code_T, return_index=True, return_inverse=True)
    keys_GB = np.stack([getattr(batch, name)[first_G].astype(np.int64) for name in by], axis=1)
    return keys_GB, group_T


def _loads(
    ids_TK: NDArray[np.uint16], group_T: NDArray[np.intp], num_groups: int, num_experts: int
) -> NDArray[np.int64]:
    """`[G, E]`; not routed is counted as an expert more and cut off."""
    size = num_experts + 1
    cell_TK = group_T[:, None] * size + np.minimum(ids_TK, num_experts)
    return np.bincount(cell_TK.reshape(-1), minlength=num_groups * size).reshape(num_groups, size)[:, :-1]


def _taken(rows: dict[tuple[int, ...], int], table: NDArray[np.int64], width: int) -> Loads:
    return Loads(np.array(list(rows), dtype=np.int64).reshape(len(rows), width), table[: len(rows)])


def _grown(table: NDArray[np.int64], groups: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """The table with room for more groups."""
    grown_bytes = 8 * groups * int(np.prod(shape))
    if grown_bytes > MAX_LOADS_BYTES:
        raise UsageError(
            f"loads of {groups:,} groups need {grown_bytes / 2**30:.1f} GiB; ask for fewer layers at a time"
        )
    grown = np.zeros((groups, *shape), np.int64)
    grown[: len(table)] = table.reshape(len(table), *shape)
    return grown
