"""Counts of samples in the arrays of an `.npz`.

`counts` is by its dimensions one of

==================================================  ==================================================================
[samples, layers, experts]                          `n_tokens` [samples] may tell the experts a token
[steps, source ranks, layers, micro-batches, E]     `iteration` [steps] names the steps; every micro-batch is a sample
==================================================  ==================================================================

Legend: S rows of the first dimension in a block; R source ranks; L MoE layers; M micro-batches; E experts.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..count_form import CountTable
from ..model import MAX_LAYERS, NOT_ROUTED
from .cells import check_counted
from .npy import NpyArray

__all__ = ["CountArrays", "counts_samples"]

BLOCK_BYTES = 32 * 2**20
MAX_ROWS = 2**31 - 1
COMPANION = {3: "n_tokens", 5: "iteration"}  # by the dimensions of counts
Block = NDArray[np.int64]


def counts_samples(arrays: dict[str, NpyArray]) -> bool:
    """Whether arrays are counts of samples, by their names and dimensions."""
    return "counts" in arrays and "expert_ids" not in arrays and len(arrays["counts"].shape) in COMPANION


class CountArrays:
    """Counts of samples; see `CountSource`."""

    step_order: Literal["known"] = "known"

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
        self.model: dict[str, Any] = {"layer_ids": tuple(range(num_layers)), "num_experts": counts.shape[-1]}
        values = _companion(arrays, COMPANION[len(counts.shape)], counts.shape[0])
        if self._by_step:
            self._steps = _steps(values)
        elif values is not None:
            self.model["top_k"] = self._top_k(values)
        left_out = sorted(set(arrays) - {"counts", COMPANION[len(counts.shape)]})
        self.notes = [f"array {name} left out" for name in left_out]

    def largest_id(self) -> int:
        """The last expert."""
        return self._counts.shape[-1] - 1

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts in their order, a bounded table at a time."""
        assert num_experts == self._counts.shape[-1]
        first = 0
        for counts in self._blocks():
            yield self._by_steps(counts, first) if self._by_step else _by_samples(counts, first)
            first += len(counts)

    def _by_steps(self, counts_SRLME: Block, first: int) -> CountTable:
        counts_SRMLE = counts_SRLME.transpose(0, 1, 3, 2, 4)
        shape = counts_SRMLE.shape[:4]
        place, rank, micro, layer = (axis.reshape(-1) for axis in np.indices(shape))
        return CountTable(
            step=self._steps[first + place],
            sample=((first + place) * shape[1] + rank) * shape[2] + micro,
            source_rank=rank.astype(np.int32),
            layer=layer.astype(np.int32),
            counts=np.ascontiguousarray(counts_SRMLE).reshape(-1, counts_SRMLE.shape[4]),
        )

    def _top_k(self, tokens: NDArray[Any]) -> int:
        """The experts a token, from the first sample; refused where another one differs."""
        found, first = 0, 0
        for counts_SLE in self._blocks():
            tokens_S = tokens[first : first + len(counts_SLE)].astype(np.int64)
            pairs_SL = counts_SLE.sum(axis=2)
            found = found or int(pairs_SL[0, 0]) // max(int(tokens_S[0]), 1)
            wrong_S = (pairs_SL != found * tokens_S[:, None]).any(axis=1) | (tokens_S < 1)
            if wrong_S.any() or not found:
                row = int(wrong_S.argmax())
                raise InputError(
                    f"sample {first + row} has {int(tokens_S[row])} tokens and {pairs_SL[row].min()} to"
                    f" {pairs_SL[row].max()} counts a layer; expected n_tokens times the experts a token in every layer"
                )
            first += len(counts_SLE)
        return found

    def _blocks(self) -> Iterator[Block]:
        """The counts as int64, checked, about 32 MiB at a time."""
        row_bytes = 8 * int(np.prod(self._counts.shape[1:], dtype=object))
        for raw in self._counts.rows(max(1, BLOCK_BYTES // row_bytes)):
            check_counted(raw, "counts")
            yield raw.astype(np.int64)


def _by_samples(counts_SLE: Block, first: int) -> CountTable:
    num_samples, num_layers, num_experts = counts_SLE.shape
    return CountTable(
        sample=np.repeat(np.arange(first, first + num_samples), num_layers),
        layer=np.tile(np.arange(num_layers, dtype=np.int32), num_samples),
        counts=counts_SLE.reshape(-1, num_experts),
    )


def _companion(arrays: dict[str, NpyArray], name: str, size: int) -> NDArray[Any] | None:
    """The integers beside the counts, one a row; None where there are none."""
    array = arrays.get(name)
    if array is None:
        return None
    if array.shape != (size,) or array.dtype.kind not in "iu":
        raise InputError(f"{name} is {array.dtype} {array.shape}; expected integers of shape ({size},)")
    (values,) = array.rows(size)
    limits = np.iinfo(np.int32)
    if int(values.min()) < limits.min or int(values.max()) > limits.max:
        raise InputError(f"{name} from {values.min()} to {values.max()}; expected int32")
    return values


def _steps(values: NDArray[Any] | None) -> NDArray[np.int32]:
    """The step of each row, all different."""
    if values is None:
        raise InputError("counts of 5 dimensions without iteration; expected the step of each row under that name")
    if len(np.unique(values)) < len(values):
        raise InputError("iteration names a step twice; expected all different")
    return values.astype(np.int32)
