"""Importer of `.npz` and `.npy` arrays of expert ids, `[tokens, layers]` or `[tokens, layers, experts per token]`.

An `.npz` names them: `expert_ids`, and if there, `weights` of the same shape, `seq_id` and `pos` `[tokens]` and
`num_experts`; or it has one array only, under any name. -1 stands for not routed, as 65535 does in a trace. One with
`counts` instead is of `count_arrays`.

Legend: T tokens; L MoE layers; K experts per token.
"""

from collections.abc import Iterator

import numpy as np

from ...errors import InputError
from ..model import MAX_LAYERS, NOT_ROUTED
from ..schema import PHASES, TokenBatch
from .cells import expert_ids, gates, largest
from .count_arrays import CountArrays, counts_samples
from .npy import NpyArray, companion, integers_as, open_arrays
from .source import BLOCK_BYTES, Given, TokenSource

MAX_BATCH_ROWS = 65_536
MAX_TOKENS = 2**31 - 1  # positions are int32
COMPANIONS = ("weights", "seq_id", "pos", "num_experts")


def recognises(head: bytes) -> bool:
    """Check whether a file begins as `.npy` or as a zip archive."""
    return head.startswith((np.lib.format.MAGIC_PREFIX, b"PK\x03\x04", b"PK\x05\x06"))


def open_source(given: Given) -> "NumpySource | CountArrays":
    """The arrays in a file, their shapes checked: of tokens, or of counts where `counts_samples`."""
    arrays = open_arrays(given.file)
    return CountArrays(arrays) if counts_samples(arrays) else NumpySource(arrays)


class NumpySource(TokenSource):
    """Arrays that together are a recording of tokens."""

    def __init__(self, arrays: dict[str, NpyArray]) -> None:
        name = "expert_ids" if "expert_ids" in arrays or len(arrays) != 1 else next(iter(arrays))
        if name not in arrays:
            names = ", ".join(sorted(arrays)) or "none"
            raise InputError(f"arrays {names}; expected expert_ids or counts, or one array only")
        self._ids = arrays[name]
        num_tokens, self._num_layers, self._top_k = _shape_of_ids(self._ids)
        per_token = (num_tokens,)
        self._weights = companion(arrays, "weights", self._ids.shape, "f")
        self._samples = companion(arrays, "seq_id", per_token, "iu")
        self._positions = companion(arrays, "pos", per_token, "iu")
        self.model = {"layer_ids": tuple(range(self._num_layers)), "top_k": self._top_k}
        if (num_experts := _number_of_experts(arrays)) is not None:
            self.model["num_experts"] = num_experts
        self.has_weights = self._weights is not None
        self.may_be_counts = not self.has_weights
        self.notes = [f"array {key} left out" for key in sorted(set(arrays) - {name, *COMPANIONS})]
        if name not in ("", "expert_ids"):
            self.notes.append(f"array {name:.80} taken for expert_ids")
        if self._samples is None:
            self.notes.append("no seq_id: samples are unknown")
        if len(self._ids.shape) == 2:
            self.notes.append("one expert a token and layer, as ExFlow records: second choices are unknown")
        if self._positions is None:
            self.notes.append("no pos: positions are row numbers")
        self._rows = max(1, min(MAX_BATCH_ROWS, BLOCK_BYTES // self._ids.row_bytes))

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed."""
        return max(largest(expert_ids(ids)) for ids in self._ids.rows(self._rows))

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens in order."""
        first_row = 0
        columns = (self._weights, self._samples, self._positions)
        streams = [array.rows(self._rows) if array else None for array in columns]
        for raw_ids in self._ids.rows(self._rows):
            weights, samples, positions = (None if stream is None else next(stream) for stream in streams)
            count = len(raw_ids)
            shape = count, self._num_layers, self._top_k
            yield TokenBatch(
                step=None,
                sample=None if samples is None else integers_as(samples, np.int64, "seq_id"),
                position=np.arange(first_row, first_row + count, dtype=np.int32)
                if positions is None
                else integers_as(positions, np.int32, "pos"),
                source_rank=None,
                phase=np.full(count, PHASES.index(phase), np.int8),
                ids=expert_ids(raw_ids).reshape(shape),
                weights=None if weights is None else gates(weights).reshape(shape),
            )
            first_row += count
        for stream in filter(None, streams):
            next(stream, None)  # the end of an archive's member checks its CRC


def _shape_of_ids(ids: NpyArray) -> tuple[int, int, int]:
    if ids.dtype.kind not in "iu":
        raise InputError(f"expert ids of type {ids.dtype}; expected integers")
    if len(ids.shape) not in (2, 3) or min(ids.shape) < 1 or ids.shape[1] > MAX_LAYERS or ids.shape[0] > MAX_TOKENS:
        raise InputError(
            f"expert ids of shape {ids.shape}; expected [tokens, layers] or [tokens, layers, experts per token],"
            f" at least one token and at most {MAX_LAYERS} layers"
        )
    return ids.shape[0], ids.shape[1], ids.shape[2] if len(ids.shape) == 3 else 1


def _number_of_experts(arrays: dict[str, NpyArray]) -> int | None:
    if "num_experts" not in arrays:
        return None
    value = arrays["num_experts"].scalar()
    if not isinstance(value, np.integer) or not 1 <= value < NOT_ROUTED:
        raise InputError(f"num_experts is {value}; expected an integer from 1 to {NOT_ROUTED - 1}")
    return int(value)
