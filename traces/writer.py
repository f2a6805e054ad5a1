"""The writer of a token trace: bounded memory, and whatever was flushed survives the death of the process.

Legend: T tokens; L MoE layers; K experts per token; C tokens the buffer holds.
"""

import os
import time
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .part_file import PartSeries
from .schema import KEYS, PHASES, TokenBatch, TraceMeta, check_tokens, token_schema

SCALARS = {"step": np.int32, "sample": np.int64, "position": np.int32, "source_rank": np.int32, "phase": np.int8}
CELLS = {"ids": np.uint16, "weights": np.float16}


class TraceWriter:
    """A stream of tokens into part files; a context manager that closes, also after an exception, with what it has.

    A part is complete when its name has no leading dot. SIGKILL loses the tokens since the last flush, no more.

    Parameters
    ----------
    directory
        Made where it is missing. Several ranks may write to one, each under its own `rank`.
    weights
        Keep the gate weights too.
    max_bytes
        A flush at this much Arrow memory, the most that is buffered.
    max_seconds
        A flush when the oldest unflushed token is this old, looked at in each `append`.
    start_ns
        The time in the names of parts, now unless given; with one of it, equal tokens make traces of equal hash.

    Raises
    ------
    MismatchError, UsageError, StorageError
        See `PartSeries`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        meta: TraceMeta,
        *,
        rank: int = 0,
        weights: bool = False,
        max_bytes: int = 64 * 2**20,
        max_seconds: float = 30.0,
        start_ns: int | None = None,
    ) -> None:
        if meta.form != "tokens":
            raise ValueError(f"meta of form {meta.form!r}; expected 'tokens' (write_counts writes the count form)")
        self.meta = meta
        self.weights = weights
        self.num_tokens = 0
        self.max_seconds = max_seconds
        self._series = PartSeries(directory, meta, rank=rank, start_ns=start_ns)
        self._schema = token_schema(meta, weights=weights)
        self._shape = (meta.model.num_layers, meta.model.top_k)
        self._kinds = {name: np.dtype(kind) for name, kind in (SCALARS | CELLS).items() if weights or name != "weights"}
        cells = int(np.prod(self._shape))
        row_bytes = sum(kind.itemsize * (1 if name in SCALARS else cells) for name, kind in self._kinds.items())
        self._capacity = max(1, max_bytes // row_bytes)
        self._columns: dict[str, NDArray[Any]] = {}
        self._filled = 0
        self._num_parts = 0
        self._oldest_s = 0.0

    def append(self, batch: TokenBatch) -> None:
        """Take the tokens of a batch with all L layers.

        Raises
        ------
        ValueError
            An array has another shape than the model says, or a column comes in some batches only.
        InputError
            A value breaks a rule of `check_tokens`; nothing of the batch is taken.
        StorageError
            A flush failed.
        """
        self._check_shape(batch)
        check_tokens(batch, self.meta.model.num_experts, self.num_tokens)
        first = 0
        while first < len(batch):
            rows = min(len(batch) - first, self._capacity - self._filled)
            self._take(batch.select(slice(first, first + rows)))
            first += rows
            if self._filled == self._capacity or time.monotonic() - self._oldest_s >= self.max_seconds:
                self.flush()

    def flush(self) -> None:
        """Write the buffered tokens as a finished part; no part where there are none."""
        if self._filled:
            self._series.write(self._table(), self._num_parts)
            self._filled, self._num_parts = 0, self._num_parts + 1  # in one: a part is never counted twice

    def close(self) -> None:
        """Flush and let the buffer go."""
        self.flush()
        self._columns = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, batch: TokenBatch) -> None:
        if not self._columns:
            self._columns = self._buffers(batch)
        if not self._filled:
            self._oldest_s = time.monotonic()
        rows = slice(self._filled, self._filled + len(batch))
        for name, buffer in self._columns.items():
            values = getattr(batch, name)
            if name in SCALARS:
                buffer[rows] = values
            else:
                buffer[:, rows] = values.transpose(1, 0, 2)
        self._filled += len(batch)
        self.num_tokens += len(batch)

    def _buffers(self, batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Arrays of the buffer by column: scalars `[C]`, ids and weights `[L, C, K]`; none for an unknown column."""
        num_layers, top_k = self._shape
        cells = num_layers, self._capacity, top_k
        return {
            name: np.empty(self._capacity if name in SCALARS else cells, kind)
            for name, kind in self._kinds.items()
            if getattr(batch, name) is not None
        }

    def _table(self) -> Any:
        """The filled part of the buffer as an Arrow table, without a copy."""
        import pyarrow as pa

        top_k = self.meta.model.top_k
        filled = {name: buffer[: self._filled] for name, buffer in self._columns.items() if name in SCALARS}
        columns: dict[str, Any] = {
            name: pa.array(filled[name]) if name in filled else pa.nulls(self._filled, self._schema.field(name).type)
            for name in SCALARS
        }
        columns["phase"] = pa.DictionaryArray.from_arrays(filled["phase"], list(PHASES))
        for prefix, name in (("layer", "ids"), ("weight", "weights")):
            for layer, buffer_CK in enumerate(self._columns.get(name, ())):
                cells = pa.array(buffer_CK[: self._filled].reshape(-1))
                columns[f"{prefix}_{layer}"] = pa.FixedSizeListArray.from_arrays(cells, top_k)
        return pa.table(columns, schema=self._schema)

    def _check_shape(self, batch: TokenBatch) -> None:
        whole, cells = (len(batch),), (len(batch), *self._shape)
        for name, kind in self._kinds.items():
            values, shape = getattr(batch, name), whole if name in SCALARS else cells
            missing = values is None
            if name not in KEYS if missing else values.shape != shape or values.dtype != kind:
                raise ValueError(f"{name}: {_text(values)}; expected {kind} {shape}")
            if self._columns and missing == (name in self._columns):
                raise ValueError(
                    f"{name} is {_text(values)} after batches where it was not so; give it always or never"
                )


def _text(values: NDArray[Any] | None) -> str:
    return "None" if values is None else f"{values.dtype} {values.shape}"
