"""SGLang's counts by forward pass: each rank's part by physical expert, added up and folded to logical experts.

Legend: H hidden layers; L MoE layers; P physical experts a layer; E experts.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..count_form import CountTable
from ..model import ModelSpec
from .cells import check_counted
from .hidden_layers import counted_layers, spans
from .ranks import common_steps
from .sglang_records import FOLDED, Records
from .torch_file import integers

__all__ = ["PassesSource"]

BLOCK_BYTES = 32 * 2**20


class PassesSource:
    """Counts of all ranks' records; see `CountSource`."""

    step_order: Literal["known"] = "known"

    def __init__(self, records: Records, model: ModelSpec | None) -> None:
        self._records = records
        self._steps, left_out = common_steps(records.by_rank, "passes")
        filled_H = np.zeros(len(records.physical_to_logical), np.bool_)
        for rank in records.by_rank:
            for step in self._steps:
                filled_H |= self._counts(rank, step).any(axis=1)
        layers, notes = counted_layers(filled_H, model)
        self._layers = list(layers)
        self.model: dict[str, Any] = {"layer_ids": layers, "num_experts": records.num_experts}
        ranks = f"ranks {spans(sorted(records.by_rank))} added up: tokens, requests and source ranks are unknown"
        self.notes = [*notes, *left_out, FOLDED, ranks]

    def largest_id(self) -> int:
        """The last expert."""
        return self._records.num_experts - 1

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts by ascending pass."""
        map_LP = self._records.physical_to_logical[self._layers]
        num_layers, layer_L1 = len(map_LP), np.arange(len(map_LP))[:, None]
        rows = max(1, BLOCK_BYTES // (8 * num_layers * num_experts))
        for first in range(0, len(self._steps), rows):
            steps = self._steps[first : first + rows]
            counts_BLE = np.zeros((len(steps), num_layers, num_experts), np.int64)
            for counts_LE, step in zip(counts_BLE, steps, strict=True):
                counts_HP = sum(self._counts(rank, step).astype(np.int64) for rank in self._records.by_rank)
                np.add.at(counts_LE, (layer_L1, map_LP), np.asarray(counts_HP)[self._layers])
            yield CountTable(
                step=np.repeat(np.array(steps, np.int32), num_layers),
                layer=np.tile(np.arange(num_layers, dtype=np.int32), len(steps)),
                counts=counts_BLE.reshape(-1, num_experts),
            )

    def _counts(self, rank: int, step: int) -> NDArray[Any]:
        """Counts of one rank in one pass, `[H, P]`, all at least 0."""
        what = f"pass {step} of rank {rank}: global_physical_count"
        counts_HP = integers(self._records.by_rank[rank][step].get("global_physical_count"), what, 2)
        if counts_HP.shape != self._records.physical_to_logical.shape:
            raise InputError(
                f"{what} of shape {counts_HP.shape}; the map has {self._records.physical_to_logical.shape}"
            )
        check_counted(counts_HP, what)
        return counts_HP
