"""The sidecar of a trace: the hidden states that entered its MoE layers, in safetensors beside the parts.

Legend: T tokens; M hidden size.
"""

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import StorageError, UsageError
from ...files import atomic_path
from ..schema import TokenBatch


class EmbeddingWriter:
    """A stream of hidden states into files `embeddings-{rank}-{start_ns}-{n}.safetensors`; a context manager.

    A file holds `layer_{l}` float16 `[T, M]` of each layer chosen and, to join it with the trace, `position` and, where
    known, `sample` and `step` `[T]`, in the order of that rank's tokens. Files appear whole.

    Parameters
    ----------
    layers
        Ordinals of MoE layers; none: nothing is written.
    max_bytes
        A flush at this many.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        layers: Collection[int],
        *,
        rank: int = 0,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        self.layers = frozenset(layers)
        self._stem = Path(directory) / f"embeddings-{rank}-{time.time_ns()}"
        self._max_bytes = max_bytes
        self._pending: list[dict[str, NDArray[Any]]] = []
        self._pending_bytes = 0
        self._num_files = 0

    def append(self, batch: TokenBatch, inputs: dict[int, NDArray[np.float16]]) -> None:
        """Take the inputs, layer -> float16 `[T, M]`, of a batch's tokens."""
        if not (self.layers and len(batch)):
            return
        columns: dict[str, Any] = {"step": batch.step, "sample": batch.sample, "position": batch.position}
        columns |= {f"layer_{layer}": inputs[layer] for layer in sorted(self.layers)}
        self._pending.append({name: column for name, column in columns.items() if column is not None})
        self._pending_bytes += sum(column.nbytes for column in self._pending[-1].values())
        if self._pending_bytes >= self._max_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a finished file; no file where there is none.

        Raises StorageError where it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        if not self._pending:
            return
        path = Path(f"{self._stem}-{self._num_files}.safetensors")
        tensors = {name: np.concatenate([part[name] for part in self._pending]) for name in self._pending[0]}
        with atomic_path(path) as temporary:
            try:
                save_file(tensors, temporary)
            except SafetensorError as error:
                raise StorageError(f"{path}: cannot be written ({error})") from error
        self._pending, self._pending_bytes, self._num_files = [], 0, self._num_files + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()


def embedded_layers(chosen: str | Iterable[int], num_layers: int) -> tuple[int, ...]:
    """The layers that `all`, ordinals, or a text of ordinals with commas between them name; an empty text names none.

    Raises UsageError where it is none of them, or names a layer that there is not.
    """
    if chosen == "all":
        return tuple(range(num_layers))
    text = chosen if isinstance(chosen, str) else ",".join(map(str, chosen))
    words = text.split(",") if text else []
    if not all(word.isdecimal() and int(word) < num_layers for word in words):
        raise UsageError(f"embeddings of layers {text}; expected all, or ordinals, 0 to {num_layers - 1}")
    return tuple(sorted({int(word) for word in words}))
