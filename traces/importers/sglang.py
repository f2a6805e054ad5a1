"""Importer of SGLang's `expert_distribution_recorder_*.pt`, of the modes stat, stat_approx, per_pass and per_token.

===============  =====================================================================================================
stat             `logical_count` [steps, layers, experts], of rank 0 only: counts by step, of `StatSource`
per_pass         `records` of every rank with `global_physical_count`: counts by step, of `PassesSource`
per_token        `records` of every rank with `topk_ids_of_layer`: tokens, of `TokensSource`
===============  =====================================================================================================

All name every hidden layer; those without experts are left out.

Legend: B rows of the ring, or passes; H hidden layers; L MoE layers; P physical experts per layer; E experts.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..count_form import CountTable
from ..model import MAX_LAYERS, NOT_ROUTED, ModelSpec
from .cells import check_counted
from .hidden_layers import counted_layers, spans
from .sglang_records import FOLDED, Records, TokensSource, records_of
from .source import BLOCK_BYTES, CountSource, Given, common_steps, naming
from .torch_file import integers, load
from .torch_file import recognises as recognises  # selection asks for it here


def open_source(given: Given) -> "StatSource | PassesSource | TokensSource":
    """The recording in files of one mode: of stat one file, else one or more of every rank."""
    dumps = {}
    for path in given.files:
        with naming(path.name):
            dumps[path] = load(path)
            if not (isinstance(dumps[path], dict) and {"logical_count", "records"} & dumps[path].keys()):
                raise InputError("neither logical_count nor records; expected what SGLang's recorder dumps")
    if any("logical_count" in dump for dump in dumps.values()):
        dump = dumps[given.file]
        return StatSource(integers(dump["logical_count"], "logical_count", 3), given.model)
    records = records_of(dumps)
    return TokensSource(records, given.model) if records.of_tokens else PassesSource(records, given.model)


class StatSource(CountSource):
    """Counts `[B, H, E]` of steps, all ranks together: a ring buffer as it lies in memory, its unused rows zero."""

    def __init__(self, counts_BHE: NDArray[Any], model: ModelSpec | None) -> None:
        num_rows, num_hidden, num_experts = counts_BHE.shape
        if min(counts_BHE.shape) < 1 or num_hidden > MAX_LAYERS or num_experts >= NOT_ROUTED:
            raise InputError(
                f"logical_count of shape {counts_BHE.shape}; expected [steps, layers, experts], at most"
                f" {MAX_LAYERS:,} layers and {NOT_ROUTED - 1:,} experts"
            )
        self._counts, self._rows = counts_BHE, max(1, BLOCK_BYTES // (16 * num_hidden * num_experts))
        filled_BH = np.zeros((num_rows, num_hidden), np.bool_)
        for row in range(0, num_rows, self._rows):
            block_BHE = counts_BHE[row : row + self._rows]
            check_counted(block_BHE, "logical_count")
            filled_BH[row : row + self._rows] = block_BHE.any(axis=2)
        self._layers, self.notes = counted_layers(np.logical_or.reduce(filled_BH, axis=0), model)
        self._order, is_known = ring_order(np.logical_or.reduce(filled_BH, axis=1))
        self.step_order = "known" if is_known else "unknown"
        self.model = {"layer_ids": self._layers, "num_experts": num_experts}
        if len(self._order) < num_rows:
            self.notes.append(f"{num_rows - len(self._order):,} unused rows of {num_rows:,} left out")
        if not is_known:
            self.notes.append("the ring buffer does not tell where it begins: the order of the steps is unknown")
        self.notes.append("counts of all ranks together: tokens, requests and source ranks are unknown")

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts in the order of the steps, as far as it is known."""
        for first in range(0, len(self._order), self._rows):
            rows = self._order[first : first + self._rows]
            counts_BLE = self._counts[rows][:, self._layers].astype(np.int64)
            yield CountTable.of_groups(("step",), first + np.arange(len(rows))[:, None], counts_BLE)


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


class PassesSource(CountSource):
    """Counts by forward pass: each rank's part by physical expert, added up and folded to logical experts."""

    def __init__(self, records: Records, model: ModelSpec | None) -> None:
        self._records = records
        self._steps, left_out = common_steps(records.by_rank, "passes")
        filled_H = np.zeros(len(records.physical_to_logical), np.bool_)
        for rank in records.by_rank:
            for step in self._steps:
                filled_H |= self._counts(rank, step).any(axis=1)
        self._layers, notes = counted_layers(filled_H, model)
        self.model = {"layer_ids": self._layers, "num_experts": records.num_experts}
        ranks = f"ranks {spans(sorted(records.by_rank))} added up: tokens, requests and source ranks are unknown"
        self.notes = [*notes, *left_out, FOLDED, ranks]

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts by ascending pass."""
        map_LP = self._records.physical_to_logical[self._layers]
        layer_L1 = np.arange(len(map_LP))[:, None]
        rows = max(1, BLOCK_BYTES // (8 * len(map_LP) * num_experts))
        for first in range(0, len(self._steps), rows):
            steps = self._steps[first : first + rows]
            counts_BLE = np.zeros((len(steps), len(map_LP), num_experts), np.int64)
            for counts_LE, step in zip(counts_BLE, steps, strict=True):
                counts_HP = sum(self._counts(rank, step).astype(np.int64) for rank in self._records.by_rank)
                np.add.at(counts_LE, (layer_L1, map_LP), np.asarray(counts_HP)[self._layers])
            yield CountTable.of_groups(("step",), np.array(steps)[:, None], counts_BLE)

    def _counts(self, rank: int, step: int) -> NDArray[Any]:
        """Counts of one rank in one pass, `[H, P]`, all at least 0."""
        what, shape = f"pass {step} of rank {rank}: global_physical_count", self._records.physical_to_logical.shape
        counts_HP = integers(self._records.by_rank[rank][step].get("global_physical_count"), what, 2)
        if counts_HP.shape != shape:
            raise InputError(f"{what} of shape {counts_HP.shape}; the map has {shape}")
        check_counted(counts_HP, what)
        return counts_HP
