"""Loads and other counts, added up by their keys (steps, samples, source ranks) in bounded memory.

Legend: T tokens; R rows; G rows or groups of different keys; B columns of a key; L MoE layers; E experts; K experts a
token.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..workers import SERIAL, Workers
from .reader import Trace
from .schema import Key, TokenBatch

MAX_BYTES = 64 * 2**20
MIN_PENDING = 2**16


class Keyed(NamedTuple):
    """Counts `[G, ...]` by ascending int64 keys `[G, B]`; loads are `[G, L, E]`, tokens that go to an expert."""

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """Counts by key as they travel between processes: of few filled cells these alone, which tokens bound."""

    keys: NDArray[np.int64]
    shape: tuple[int, ...]
    cells: NDArray[np.intp] | None  #: Places of the counts in the table, ascending; None: all
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, keyed: Keyed) -> Self:
        """Pack counts."""
        counts = keyed.counts.reshape(-1)
        cells = np.flatnonzero(counts)
        if 2 * len(cells) >= len(counts):
            return cls(keyed.keys, keyed.counts.shape, None, counts)
        return cls(keyed.keys, keyed.counts.shape, cells, counts[cells])

    def unpacked(self) -> Keyed:
        """The counts again."""
        if self.cells is None:
            return Keyed(self.keys, self.counts.reshape(self.shape))
        counts = np.zeros(self.shape, np.int64)
        counts.reshape(-1)[self.cells] = self.counts
        return Keyed(self.keys, counts)


class CountRows:
    """A table of distinct rows that comes out, and begins anew, whenever 64 MiB are full.

    Parameters
    ----------
    width
        B, the columns of a key.
    shape
        Of the counts of a row.

    Attributes
    ----------
    most
        Rows it holds at most.
    """

    def __init__(self, width: int, shape: tuple[int, ...]) -> None:
        self.most = max(1, MAX_BYTES // (8 * max(1, int(np.prod(shape)))))
        self._width = width
        self._row_of_key: dict[tuple[int, ...], int] = {}
        self._table = np.zeros((self.most, *shape), np.int64)

    def add(self, keys_RB: NDArray[np.int64], counts: NDArray[np.int64], *cell: NDArray[np.integer]) -> Iterator[Keyed]:
        """Add rows of counts `[R, ...]`, or counts `[R]` at these indices into a row; what makes room comes out."""
        keys_GB, row_R = distinct_rows(keys_RB)
        for first in range(0, len(keys_GB), self.most):
            keys = list(map(tuple, keys_GB[first : first + self.most].tolist()))
            if len(self._row_of_key.keys() | keys) > self.most:
                yield self.taken()
            slots = np.array([self._row_of_key.setdefault(key, len(self._row_of_key)) for key in keys], np.intp)
            whole = len(keys) == len(keys_GB)
            inside = slice(None) if whole else np.flatnonzero((row_R >= first) & (row_R < first + len(keys)))
            slot_R = slots[row_R[inside] - first]
            if not cell and len(slot_R) == len(slots):
                self._table[slot_R] += counts[inside]
            else:
                np.add.at(self._table, (slot_R, *(index[inside] for index in cell)), counts[inside])

    def taken(self) -> Keyed:
        """The rows there are; it is empty afterwards."""
        held = np.array(list(self._row_of_key), np.int64).reshape(len(self._row_of_key), self._width)
        keys_GB, place = distinct_rows(held)
        counts = self._table[np.argsort(place)]
        self._row_of_key = {}
        self._table[:] = 0
        return Keyed(keys_GB, counts)


class Distinct:
    """The set of the values added, in time that grows with their number whatever their order.

    What is added waits until there is as much of it as of what is known: each value is sorted a few times only.
    """

    def __init__(self) -> None:
        self._known: NDArray[np.int64] = np.zeros(0, np.int64)
        self._pending: list[NDArray[np.int64]] = []
        self._num_pending = 0

    def add(self, values: NDArray[np.int32 | np.int64]) -> None:
        """Take values; repetitions in a row, which is how samples and steps come, cost next to nothing."""
        changed = np.flatnonzero(values[1:] != values[:-1]) + 1
        kept = np.concatenate([values[:1], values[changed]]).astype(np.int64)
        self._pending.append(kept)
        self._num_pending += len(kept)
        if self._num_pending > max(MIN_PENDING, len(self._known)):
            self._merge()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> NDArray[np.int64]:
        """The values, ascending."""
        self._merge()
        return self._known

    def _merge(self) -> None:
        self._known = np.unique(np.concatenate([self._known, *self._pending]))
        self._pending, self._num_pending = [], 0


def distinct_rows(table_RB: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The different rows `[G, B]`, ascending, and which of them each row is, `[R]`; without columns all are alike."""
    if not table_RB.shape[1]:
        return table_RB[:1], np.zeros(len(table_RB), np.intp)
    order = np.lexsort(table_RB.T[::-1])
    sorted_RB = table_RB[order]
    is_new_R = np.ones(len(order), np.bool_)
    is_new_R[1:] = (sorted_RB[1:] != sorted_RB[:-1]).any(1)
    place_R = np.empty(len(order), np.intp)
    place_R[order] = is_new_R.cumsum() - 1
    return sorted_RB[is_new_R], place_R


def grouped_loads(
    trace: Trace,
    by: Sequence[Key],
    *,
    phases: Collection[str] | None = None,
    may_lack: bool = False,
    workers: Workers = SERIAL,
) -> Iterator[Keyed]:
    """The loads of groups of tokens; whenever 64 MiB are full, what was counted comes out.

    The same group may come out again; its loads then add up. `by` names the columns that tell groups apart; none: all
    are one group. UsageError where the trace lacks such a column, or tokens of these phases that it may not lack.
    """
    if missing := set(by) - trace.known:
        raise UsageError(f"{trace.path}: no column {', '.join(sorted(missing))} was recorded; it cannot be grouped by")
    rows, is_empty = CountRows(len(by), (trace.model.num_layers, trace.model.num_experts)), True
    for counted in workers.map(_loads_of_run, ((run, by, phases) for run in trace.runs())):
        for packed in counted:
            is_empty = False
            yield from rows.add(*packed.unpacked())
    if is_empty and not may_lack:
        raise trace.lacking(phases)
    yield rows.taken()


def _loads_of_run(run: Trace, by: Sequence[Key], phases: Collection[str] | None) -> list[Packed]:
    """The loads of groups in a run of parts."""
    num_experts = run.model.num_experts
    rows, counted = CountRows(len(by), (run.model.num_layers, num_experts)), list[Packed]()
    for batch in run.batches(phases=phases, may_lack=True):
        for part in batch_loads(batch, by, num_experts, most=rows.most):
            counted += map(Packed.of, rows.add(*part))
    last = rows.taken()
    return [*counted, Packed.of(last)] if len(last.keys) else counted


def batch_loads(batch: TokenBatch, by: Sequence[Key], num_experts: int, *, most: int) -> Iterator[Keyed]:
    """The loads of the groups in a batch, at most `most` groups at a time; a group may come out again."""
    columns = [np.asarray(getattr(batch, name), np.int64) for name in by]
    key_TB = np.stack(columns, axis=1) if columns else np.zeros((len(batch), 0), np.int64)
    keys_GB, group_T = distinct_rows(key_TB)
    if len(keys_GB) > most:
        middle = len(batch) // 2
        for half in (slice(middle), slice(middle, None)):
            yield from batch_loads(batch.select(half), by, num_experts, most=most)
        return
    size = num_experts + 1  # not routed is counted as an expert more and cut off
    loads_GLE = np.empty((len(keys_GB), batch.ids.shape[1], num_experts), np.int64)
    first_T1, cell_TK = group_T[:, None] * size, np.empty((len(batch), batch.ids.shape[2]), np.intp)
    for layer in range(batch.ids.shape[1]):  # into one table: a new one each has its pages cleared
        np.minimum(batch.ids[:, layer], num_experts, out=cell_TK)
        if len(keys_GB) > 1:
            cell_TK += first_T1
        loads = np.bincount(cell_TK.reshape(-1), minlength=len(keys_GB) * size)
        loads_GLE[:, layer] = loads.reshape(-1, size)[:, :-1]
    yield Keyed(keys_GB, loads_GLE)
