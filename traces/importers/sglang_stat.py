"""SGLang's counts by step: a ring buffer as it lies in memory, its unused rows zero.

Legend: B rows of the ring; H hidden layers; L MoE layers; E experts.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..count_form import CountTable
from ..model import MAX_LAYERS, NOT_ROUTED, ModelSpec
from .cells import check_counted
from .hidden_layers import counted_layers

__all__ = ["StatSource", "ring_order"]

BLOCK_BYTES = 16 * 2**20


class StatSource:
    """Counts `[B, H, E]` of steps; see `CountSource`."""

    def __init__(self, counts_BHE: NDArray[Any], model: ModelSpec | None) -> None:
        num_rows, num_hidden, num_experts = counts_BHE.shape
        if min(counts_BHE.shape) < 1 or num_hidden > MAX_LAYERS or num_experts >= NOT_ROUTED:
            raise InputError(
                f"logical_count of shape {counts_BHE.shape}; expected [steps, layers, experts], at most"
                f" {MAX_LAYERS:,} layers and {NOT_ROUTED - 1:,} experts"
            )
        self._counts, self._rows = counts_BHE, max(1, BLOCK_BYTES // (8 * num_hidden * num_experts))
        filled_BH = np.zeros((num_rows, num_hidden), np.bool_)
        for row in range(0, num_rows, self._rows):
            block_BHE = counts_BHE[row : row + self._rows]
            check_counted(block_BHE, "logical_count")
            filled_BH[row : row + self._rows] = block_BHE.any(axis=2)
        layers, self.notes = counted_layers(np.logical_or.reduce(filled_BH, axis=0), model)
        self._order, is_known = ring_order(np.logical_or.reduce(filled_BH, axis=1))
        self.step_order: Literal["known", "unknown"] = "known" if is_known else "unknown"
        self._layers = list(layers)
        self.model: dict[str, Any] = {"layer_ids": layers, "num_experts": num_experts}
        if len(self._order) < num_rows:
            self.notes.append(f"{num_rows - len(self._order):,} unused rows of {num_rows:,} left out")
        if not is_known:
            self.notes.append("the ring buffer does not tell where it begins: the order of the steps is unknown")
        self.notes.append("counts of all ranks together: tokens, requests and source ranks are unknown")

    def largest_id(self) -> int:
        """The last expert."""
        return int(self._counts.shape[2]) - 1

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts in the order of the steps, as far as it is known."""
        num_layers = len(self._layers)
        for first in range(0, len(self._order), self._rows):
            rows = self._order[first : first + self._rows]
            yield CountTable(
                step=np.repeat(np.arange(first, first + len(rows), dtype=np.int32), num_layers),
                layer=np.tile(np.arange(num_layers, dtype=np.int32), len(rows)),
                counts=self._counts[rows][:, self._layers].reshape(-1, num_experts).astype(np.int64),
            )


def ring_order(used_B: NDArray[np.bool_]) -> tuple[NDArray[np.intp], bool]:
    """The used rows of a ring, in order where that is known, and whether it is.

    Notes
    -----
    A partly filled ring was written from after its run of unused rows on, wherever that lies. A full one begins
    anywhere; so does one with several runs, where some steps counted nothing.
    """
    begins = np.flatnonzero(used_B & ~np.roll(used_B, 1))
    rows = np.flatnonzero(used_B)
    if len(begins) != 1:
        return rows, False
    return (begins[0] + np.arange(len(rows))) % len(used_B), True
