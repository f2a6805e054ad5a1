"""The count form of a trace: how many tokens each expert got, where tokens themselves are not known.

Rows of equal step, sample, source rank and layer add up, so that it can be written in bounded memory.

Legend: R rows; G groups of tokens; B keys; L MoE layers; E experts.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..files import atomic_directory
from ..workers import SERIAL, Workers
from .dataset import Dataset, form_of
from .loads import CountRows, Packed, grouped_loads
from .model import MAX_NAME
from .part_file import PartSeries, local_directory
from .reader import Trace, open_trace
from .schema import KEYS, Key, Rows, TraceMeta, check_counts, count_schema, refusing

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_BYTES = 2**27  # of a trace that stays in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTable(Rows):
    """Rows of the count form; None where a key is unknown."""

    #: step, sample, source_rank: `[R]`: int32, int64, int32
    step: NDArray[np.int32] | None = None
    sample: NDArray[np.int64] | None = None
    source_rank: NDArray[np.int32] | None = None
    layer: NDArray[np.int32]  #: int32 `[R]`
    counts: NDArray[np.int64]  #: int64 `[R, E]`

    def __len__(self) -> int:
        return len(self.layer)

    @classmethod
    def of(cls, keys: Sequence[Key], key_RB: NDArray[np.int64], counts_RE: NDArray[np.int64]) -> Self:
        """Counts from rows of these keys' values and, in the last column, the layer."""
        columns: dict[str, Any] = {
            name: column.astype(np.int64 if name == "sample" else np.int32)
            for name, column in zip((*keys, "layer"), key_RB.T, strict=True)
        }
        return cls(**columns, counts=counts_RE)

    @classmethod
    def of_groups(cls, keys: Sequence[Key], key_GB: NDArray[np.integer], counts_GLE: NDArray[np.int64]) -> Self:
        """Counts of groups of tokens in every layer, with these keys' values of each group."""
        layers = np.arange(counts_GLE.shape[1], dtype=np.int64)
        key_RB = np.column_stack([np.repeat(key_GB, len(layers), axis=0), np.tile(layers, len(key_GB))])
        return cls.of(keys, key_RB, counts_GLE.reshape(len(key_RB), counts_GLE.shape[2]))


@dataclass(frozen=True)
class CountTrace(Dataset):
    """A trace in count form on disk; see `Dataset` for its attributes."""

    form: ClassVar[str] = "counts"

    def tables(self) -> Iterator[CountTable]:
        """Rows, a bounded table at a time; read once where all of them fit into `KEPT_BYTES`.

        Raises InputError where a part is damaged or breaks a rule.
        """
        return iter(self._kept) if self.num_rows * self._row_bytes <= KEPT_BYTES else self._read()

    @property
    def _row_bytes(self) -> int:
        return 20 + 8 * self.meta.model.num_experts

    @cached_property
    def _kept(self) -> list[CountTable]:
        return [*self._read()]

    def _read(self) -> Iterator[CountTable]:
        model = self.meta.model
        for path, _, arrow in self.read([*KEYS, "layer", "counts"], self._row_bytes):
            with refusing(path):
                columns: dict[str, Any] = {name: _filled(arrow.column(name)) for name in (*KEYS, "layer")}
                cells = arrow.column("counts")
                counts = None if cells.null_count else _filled(cells.flatten())
                if columns["layer"] is None or counts is None or any(columns[name] is None for name in self.known):
                    raise InputError("nulls in layer, counts or a key; expected none")
                columns["counts"] = counts.reshape(-1, model.num_experts)
                check_counts(columns["layer"], columns["counts"], model.num_layers)
            yield CountTable(**columns)


def read_counts(path: str | os.PathLike[str]) -> CountTrace:
    """The count-form trace in a directory, a file or at a URI; errors as in `open_trace`."""
    return CountTrace.open(path)


def open_any(path: str | os.PathLike[str]) -> Trace | CountTrace:
    """The trace of either form in a directory, a file or at a URI; errors as in `open_trace`."""
    return read_counts(path) if form_of(path) == "counts" else open_trace(path)


def of_tokens(trace: Trace | CountTrace) -> Trace:
    """The trace itself; of counts `open_trace` says that they hold no tokens."""
    return trace if isinstance(trace, Trace) else open_trace(trace.path)


def write_counts(directory: str | os.PathLike[str], meta: TraceMeta, tables: Iterable[CountTable]) -> tuple[Path, ...]:
    """Write tables as the parts of a new count-form trace, all or none; returns the parts.

    Raises
    ------
    UsageError
        The directory is not empty, or not local (see `local_directory`).
    StorageError
        It cannot be written.
    InputError
        A count is negative or a layer is not the model's.
    """
    target = local_directory(directory)
    with atomic_directory(target) as temporary:
        series = PartSeries(temporary, meta)
        names = [series.write(_arrow(table, meta), number).name for number, table in enumerate(tables)]
    return tuple(target / name for name in names)


def meta_of_counts(trace: Trace | CountTrace) -> TraceMeta:
    """The metadata of what is counted of a trace."""
    recorder = f"count of {trace.meta.recorder}"[:MAX_NAME]
    return trace.meta.model_copy(update={"form": "counts", "recorder": recorder})


def tabulate(
    trace: Trace, *, phases: Collection[str] | None = None, may_lack: bool = False, workers: Workers = SERIAL
) -> Iterator[CountTable]:
    """The counts of a token trace by all the keys it has; parameters as of `grouped_loads`."""
    keys = tuple(key for key in KEYS if key in trace.known)
    for part in grouped_loads(trace, keys, phases=phases, may_lack=may_lack, workers=workers):
        if len(part.keys):
            yield CountTable.of_groups(keys, *part)


def condense(*traces: CountTrace, workers: Workers = SERIAL) -> Iterator[CountTable]:
    """The tables of traces in count form, of one model and the same keys, with rows of equal keys added up.

    As far as memory reaches: a row may come out again.
    """
    keys = tuple(key for key in KEYS if key in traces[0].known)
    rows = CountRows(len(keys) + 1, (traces[0].meta.model.num_experts,))
    for counted in workers.map(_condensed_run, ((run, keys) for trace in traces for run in trace.runs())):
        for packed in counted:
            for full in rows.add(*packed.unpacked()):
                yield CountTable.of(keys, *full)
    yield CountTable.of(keys, *rows.taken())


def _condensed_run(run: CountTrace, keys: Sequence[Key]) -> list[Packed]:
    """The rows of a run of parts with rows of equal keys added up."""
    rows, counted = CountRows(len(keys) + 1, (run.meta.model.num_experts,)), list[Packed]()
    for table in run.tables():
        columns = [getattr(table, name) for name in (*keys, "layer")]
        counted += map(Packed.of, rows.add(np.stack(columns, axis=1).astype(np.int64), table.counts))
    return [*counted, Packed.of(rows.taken())]


def _arrow(table: CountTable, meta: TraceMeta) -> "pa.Table":
    """A table as the columns of a part."""
    import pyarrow as pa

    check_counts(table.layer, table.counts, meta.model.num_layers)
    schema = count_schema(meta)
    columns: dict[str, Any] = {name: getattr(table, name) for name in (*KEYS, "layer")}
    for name in KEYS:
        if columns[name] is None:
            columns[name] = pa.nulls(len(table), schema.field(name).type)
    columns["counts"] = pa.FixedSizeListArray.from_arrays(table.counts.reshape(-1), meta.model.num_experts)
    return pa.table(columns, schema=schema)


def _filled(column: Any) -> NDArray[Any] | None:
    """The values of a column; None where it is null."""
    return None if column.null_count else np.asarray(column.to_numpy())
