"""The rows of one Parquet table, checked: foreign files are damaged or hostile until shown otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...files import size_of
from ..measurement import MAX_SECONDS, MIN_SECONDS

MAX_FILE_BYTES = 256 * 2**20
MAX_BYTES = 1 * 2**30  # decompressed
MAX_ROWS = 2_000_000
MAX_SIZE = 2**40
MAX_NAME = 64
MAX_DISTINCT = 256  # texts of a column, or values to split by
MAX_DTYPES = 16  # a fit of each takes seconds
OPTIONAL = "kernel_source"
DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of a table, `[R]` each: names as text, sizes as int64, times in seconds as float64."""

    path: Path
    columns: Mapping[str, NDArray[Any]]

    @classmethod
    def read(
        cls, path: Path, *, names: Sequence[str] = (), sizes: Sequence[str], times: Sequence[str], s_per_unit: float
    ) -> Self:
        """The columns of these names; others are not looked at.

        Parameters
        ----------
        s_per_unit
            Seconds a unit of the table's times.

        Raises
        ------
        InputError
            The file is no Parquet table, lacks a column, or a column holds what no measurement gives: text that does
            not print, sizes that are negative or beyond 2**40, times between 0 and a picosecond or of more than a day.

        Notes
        -----
        Old tables do not name the kernel: `kernel_source` is then "" in every row.
        """
        table = _table(path, names, (*sizes, *times))
        columns: dict[str, NDArray[Any]] = {name: _names(path, name, table) for name in names}
        columns |= {name: _numbers(path, name, table, "int64", MAX_SIZE) for name in sizes}
        times_s = {
            name: _numbers(path, name, table, "float64", MAX_SECONDS / s_per_unit) * s_per_unit for name in times
        }
        if any(((column > 0) & (column < MIN_SECONDS)).any() for column in times_s.values()):
            raise InputError(f"{path}: column {', '.join(times)} holds times below a picosecond; expected 0 or more")
        return cls(path, columns | times_s)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def where(self, kept: NDArray[np.bool_]) -> Self:
        """Select rows by a mask."""
        return type(self)(self.path, {name: column[kept] for name, column in self.columns.items()})

    def above_zero(self, names: Sequence[str]) -> Self:
        """The rows in which none of these columns is 0."""
        return self.where(np.all([self[name] > 0 for name in names], axis=0))

    def having(self, name: str, column: NDArray[Any]) -> Self:
        """Rows with one more column."""
        return type(self)(self.path, {**self.columns, name: column})

    def by(self, name: str, *, most: int = MAX_DISTINCT) -> dict[Any, Self]:
        """The rows of each value of a column, values ascending."""
        values = np.unique(self[name]).tolist()
        if len(values) > most:
            raise InputError(f"{self.path}: {len(values):,} values of {name}; expected at most {most}")
        return {value: self.where(self[name] == value) for value in values}

    def by_dtype(self, name: str) -> dict[str, Self]:
        """The rows of each dtype, under our name of it, or its own where we have none."""
        ours = np.array([DTYPES.get(theirs, theirs) for theirs in self[name].tolist()], dtype=np.str_)
        return self.having(name, ours).by(name, most=MAX_DTYPES)


def _table(path: Path, names: Sequence[str], numbers: Sequence[str]) -> Any:
    """The columns that are wanted, text as dictionaries: unpacked, a long text would be held once a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if (size := size_of(path, what="a Parquet table")) > MAX_FILE_BYTES:
        raise InputError(f"{path}: {size:,} bytes, expected a Parquet table of at most {MAX_FILE_BYTES:,}")
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        _check(path, metadata, [name for name in (*names, *numbers) if name not in (*schema.names, OPTIONAL)])
        if twice := [name for name in (*names, *numbers) if schema.names.count(name) > 1]:
            raise InputError(f"{path}: column {', '.join(twice)} is there more than once; expected once")
        text = [name for name in names if name in schema.names and pa.types.is_string(schema.field(name).type)]
        with pq.ParquetFile(path, metadata=metadata, read_dictionary=text) as file:
            return file.read(columns=[name for name in (*names, *numbers) if name in schema.names])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a Parquet table: {str(error)[:120]}") from error


def _check(path: Path, metadata: Any, missing: Sequence[str]) -> None:
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; expected a table of aiconfigurator's")
    num_bytes = sum(metadata.row_group(place).total_byte_size for place in range(metadata.num_row_groups))
    if not (0 < metadata.num_rows <= MAX_ROWS and num_bytes <= MAX_BYTES):
        raise InputError(
            f"{path}: {metadata.num_rows:,} rows of {num_bytes:,} bytes; expected 1 to {MAX_ROWS:,} of at most"
            f" {MAX_BYTES:,}"
        )


def _names(path: Path, name: str, table: Any) -> NDArray[np.str_]:
    if name == OPTIONAL and name not in table.column_names:
        return np.full(table.num_rows, "")
    column = _cast(path, name, table, "text").unify_dictionaries().combine_chunks()
    values = column.dictionary.to_pylist()
    if len(values) > MAX_DISTINCT or not all(len(value) <= MAX_NAME and value.isprintable() for value in values):
        raise InputError(
            f"{path}: column {name} holds {len(values):,} texts, not all of them names; expected at most {MAX_DISTINCT}"
            f" of at most {MAX_NAME} letters"
        )
    found: NDArray[np.str_] = np.array(values, dtype=np.str_)[column.indices.to_numpy()]
    return found


def _numbers(path: Path, name: str, table: Any, kind: str, most: float) -> NDArray[Any]:
    found: NDArray[Any] = _cast(path, name, table, kind).to_numpy()
    if not ((found >= 0) & (found <= most)).all():
        raise InputError(f"{path}: column {name} holds numbers out of range; expected 0 to {most:,.0f}")
    return found


def _cast(path: Path, name: str, table: Any, kind: str) -> Any:
    """The column without nulls and in the type wanted."""
    import pyarrow as pa

    column = table[name]
    wanted = pa.dictionary(pa.int32(), pa.string()) if kind == "text" else kind
    try:
        found = column.cast(wanted)
    except pa.ArrowException as error:
        raise InputError(f"{path}: column {name} is {column.type}, expected {kind}") from error
    if found.null_count:
        raise InputError(f"{path}: column {name} has {found.null_count:,} nulls; expected none")
    return found
