"""Importer of counts as CSV: columns layer, expert and count, and if there step, sample and source_rank, in any order.

Rows that agree in all but the count add up; cells without a row are 0. The layers that occur are the MoE layers.

Legend: R rows of a block; B columns that tell rows of the count form apart.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..count_form import CountTable
from ..loads import CountRows
from ..model import MAX_LAYERS, NOT_ROUTED
from ..schema import KEYS, MAX_COUNT
from .source import CountSource, Given

NEEDED = ("layer", "expert", "count")
BLOCK_BYTES = 2**20
FREE_CELLS = 2**28  # of the count form, which has one for every expert
MAX_EXPANSION = 512  # cells a row of the file, allowed beyond FREE_CELLS
INT32, INT64 = 2**31 - 1, 2**63 - 1
LIMITS = {  # a count of 2^40 leaves room to add them up
    "layer": (0, INT32), "expert": (0, NOT_ROUTED - 2), "count": (0, MAX_COUNT),
    "step": (-INT32 - 1, INT32), "sample": (-INT64 - 1, INT64), "source_rank": (-INT32 - 1, INT32),
}  # fmt: skip
Block = dict[str, NDArray[np.int64]]


def recognises(head: bytes) -> bool:
    """Check whether a file begins with a header that names layer, expert and count."""
    return set(NEEDED) <= set(_names(head.partition(b"\n")[0]))


def lacking(path: Path, head: bytes) -> str | None:
    """Say which columns a file lacks to be of counts, by its header; None where it is no CSV, or lacks none."""
    names = _names(head.partition(b"\n")[0])
    there, missing = ", ".join(names), [name for name in NEEDED if name not in names]
    is_csv = path.suffix.lower() == ".csv" or len(missing) < len(NEEDED)
    if not (is_csv and missing and there and there.isprintable()):
        return None
    return (
        f"CSV without the column{'s' * (len(missing) > 1)} {', '.join(missing)}; its header has {there:.160}, expected"
        f" {', '.join(NEEDED)}, and if known {', '.join(KEYS)}"
    )


def open_source(given: Given) -> "CsvSource":
    """The counts in a file, every row checked: one of another number of values, or out of their ranges, is named."""
    return CsvSource(given.file)


class CsvSource(CountSource):
    """Counts of a file, read twice: which layers and experts there are, then what they count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as stream:
            header = _names(stream.readline(BLOCK_BYTES))
        if repeated := {name for name in header if name in LIMITS and header.count(name) > 1}:
            raise InputError(f"two columns {', '.join(sorted(repeated))}; expected one of each")
        self._header, self._columns = header, [name for name in LIMITS if name in header]
        layers: set[int] = set()
        self._largest, self._num_rows = -1, 0
        for block in self._blocks():
            layers.update(np.unique(block["layer"]).tolist())
            if len(layers) > MAX_LAYERS:
                raise InputError(f"more than {MAX_LAYERS:,} layers; expected the MoE layers of a model")
            self._largest = max(self._largest, int(block["expert"].max()))
            self._num_rows += len(block["layer"])
        if not self._num_rows:
            raise InputError("a header and no counts; expected rows of layer,expert,count")
        self._layer_ids = np.array(sorted(layers), np.int64)
        self.model = {"layer_ids": tuple(sorted(layers))}
        left_out = [name for name in header if name not in LIMITS]
        self.notes = [f"{len(left_out)} columns left out: {', '.join(left_out)[:80]}"] if left_out else []

    def largest_id(self) -> int:
        """The largest expert id that has a row."""
        return self._largest

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts, rows added up as far as memory reaches.

        Raises InputError where an expert is beyond `num_experts`, or few rows would become a great many cells.
        """
        if self._largest >= num_experts:
            raise InputError(f"expert {self._largest}; expected 0 to {num_experts - 1}")
        num_cells, most = 0, max(FREE_CELLS, MAX_EXPANSION * self._num_rows)
        for table in self._summed(num_experts):
            num_cells += table.counts.size
            if num_cells > most:
                raise InputError(
                    f"{self._num_rows:,} rows of {num_experts:,} experts are over {most:,} counts, most of them 0;"
                    " expected fewer: add up steps or samples, or give the number of experts that there are"
                )
            yield table

    def _summed(self, num_experts: int) -> Iterator[CountTable]:
        """The counts, a bounded table at a time."""
        keys = [name for name in KEYS if name in self._columns]
        rows = CountRows(len(keys) + 1, (num_experts,))
        for block in self._blocks():
            layer_R = np.searchsorted(self._layer_ids, block["layer"])
            key_RB = np.stack([*(block[name] for name in keys), layer_R], axis=1)
            for full in rows.add(key_RB, block["count"], block["expert"]):
                yield CountTable.of(keys, *full)
        yield CountTable.of(keys, *rows.taken())

    def _blocks(self) -> Iterator[Block]:
        """The columns of about a mebibyte of rows at a time, checked."""
        import pyarrow as pa
        from pyarrow import csv

        names = [name if name in LIMITS else f"column {index}" for index, name in enumerate(self._header)]  # distinct
        read = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, skip_rows=1, column_names=names)
        kinds = dict.fromkeys(self._columns, pa.int64())
        convert = csv.ConvertOptions(column_types=kinds, include_columns=self._columns, null_values=[])
        first_row = 2
        with _refusing(), csv.open_csv(self._path, read_options=read, convert_options=convert) as stream:
            for arrow in stream:
                block: Block = {name: arrow.column(name).to_numpy() for name in self._columns}
                for name, values in block.items():
                    _check(name, values, first_row)
                first_row += arrow.num_rows
                if arrow.num_rows:
                    yield block


def _names(line: bytes) -> list[str]:
    """The columns that a header names, in small letters."""
    text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    return [name.strip().strip('"').strip().lower() for name in text.split(",")]


def _check(name: str, values: NDArray[Any], first_row: int) -> None:
    low, high = LIMITS[name]
    wrong = (values < low) | (values > high)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(f"row {first_row + row}: {name} {values[row]}; expected {low} to {high}")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn what Arrow says of a file into one line; its rows are counted from the header, which is row 1."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        reason = " ".join(str(error)[:400].split())[:200]
        raise InputError(f"not the counts that its header names: {reason}") from error
