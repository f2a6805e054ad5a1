"""Counts of samples in the arrays of an `.npz`.

`counts` is by its dimensions one of

==================================================  ==================================================================
[samples, layers, experts]                          `n_tokens` [samples] may tell the experts per token
[steps, source ranks, layers, micro-batches, E]     `iteration` [steps] names the steps; every micro-batch is a sample
==================================================  ==================================================================

Legend: S rows of the first dimension in a block; R source ranks; L MoE layers; M micro-batches; E experts.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..count_form import CountTable
from ..model import MAX_LAYERS, NOT_ROUTED
from .cells import check_counted
from .npy import NpyArray, companion, integers_as
from .source import BLOCK_BYTES, CountSource

MAX_ROWS = 2**31 - 1
COMPANION = {3: "n_tokens", 5: "iteration"}  # by the dimensions of counts
Block = NDArray[np.int64]


def counts_samples(arrays: dict[str, NpyArray]) -> bool:
    """Check whether arrays are counts of samples, by their names and dimensions."""
    return "counts" in arrays and "expert_ids" not in arrays and len(arrays["counts"].shape) in COMPANION


class CountArrays(CountSource):
    """Counts of samples."""

    def __init__(self, arrays: dict[str, NpyArray]) -> None:
        counts = arrays["counts"]
        if counts.dtype.kind not in "iu" or min(counts.shape) < 1:
            raise InputError(
                f"counts is {counts.dtype} {counts.shape}; expected integers [samples, layers, experts] or"
                " [steps, source ranks, layers, micro-batches, experts]"
            )
        self._counts, self._by_step = counts, len(counts.shape) == 5
        num_layers = counts.shape[2 if self._by_step else 1]
        if num_layers > MAX_LAYERS or counts.shape[-1] >= NOT_ROUTED or counts.shape[0] > MAX_ROWS:
            raise InputError(
                f"counts of shape {counts.shape}; expected at most {MAX_LAYERS:,} layers and {NOT_ROUTED - 1:,} experts"
            )
        self.model = {"layer_ids": tuple(range(num_layers)), "num_experts": counts.shape[-1]}
        name = COMPANION[len(counts.shape)]
        values = _companion(arrays, name, counts.shape[0])
        if self._by_step:
            self._steps = _steps(values)
        elif values is not None:
            self.model["top_k"] = self._top_k(values)
        self.notes = [f"array {other} left out" for other in sorted(set(arrays) - {"counts", name})]

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts in their order, a bounded table at a time."""
        assert num_experts == self._counts.shape[-1]
        first = 0
        for counts in self._blocks():
            if self._by_step:
                yield self._by_steps(counts, first)
            else:
                sample_S1 = np.arange(first, first + len(counts), dtype=np.int64)[:, None]
                yield CountTable.of_groups(("sample",), sample_S1, counts)
            first += len(counts)

    def _by_steps(self, counts_SRLME: Block, first: int) -> CountTable:
        num_steps, num_ranks, num_layers, num_micro, num_experts = counts_SRLME.shape
        row, rank, _ = (axis.reshape(-1) for axis in np.indices((num_steps, num_ranks, num_micro)))
        sample = first * num_ranks * num_micro + np.arange(len(row))
        counts_GLE = counts_SRLME.transpose(0, 1, 3, 2, 4).reshape(len(row), num_layers, num_experts)
        key_GB = np.stack([self._steps[first + row], sample, rank], axis=1)
        return CountTable.of_groups(("step", "sample", "source_rank"), key_GB, counts_GLE)

    def _top_k(self, tokens: NDArray[np.int32]) -> int:
        """The experts per token, from the first sample; refused where another one differs."""
        top_k, first = 0, 0
        for counts_SLE in self._blocks():
            tokens_S = tokens[first : first + len(counts_SLE)].astype(np.int64)
            pairs_SL = counts_SLE.sum(axis=2)
            top_k = top_k or int(pairs_SL[0, 0]) // max(int(tokens_S[0]), 1)
            wrong_S = (pairs_SL != top_k * tokens_S[:, None]).any(axis=1) | (tokens_S < 1)
            if wrong_S.any() or not top_k:
                row = int(wrong_S.argmax())
                raise InputError(
                    f"sample {first + row} has {int(tokens_S[row])} tokens and {pairs_SL[row].min()} to"
                    f" {pairs_SL[row].max()} counts per layer; expected n_tokens times the experts per token"
                    " in every layer"
                )
            first += len(counts_SLE)
        return top_k

    def _blocks(self) -> Iterator[Block]:
        """The counts as int64, checked, about 32 MiB at a time."""
        row_bytes = 8 * int(np.prod(self._counts.shape[1:], dtype=object))
        for raw in self._counts.rows(max(1, BLOCK_BYTES // row_bytes)):
            check_counted(raw, "counts")
            yield raw.astype(np.int64)


def _companion(arrays: dict[str, NpyArray], name: str, size: int) -> NDArray[np.int32] | None:
    """The integers beside the counts, one a row; None where there are none."""
    array = companion(arrays, name, (size,), "iu")
    if array is None:
        return None
    (values,) = array.rows(size)
    return integers_as(values, np.int32, name)


def _steps(values: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """The step of each row, all different."""
    if values is None:
        raise InputError("counts of 5 dimensions without iteration; expected the step of each row under that name")
    if len(np.unique(values)) < len(values):
        raise InputError("iteration names a step twice; expected all different")
    return values
