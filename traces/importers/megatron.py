"""Importer of Megatron-LM's `router_trace_rank*.jsonl`, a file a rank, a line a step, block and layer.

Tokens, where every rank has the same layers; counts, where pipeline stages recorded their own: their tokens cannot be
joined.

Legend: T tokens; L MoE layers; K experts a token; E experts.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import InputError
from ..count_form import CountTable
from ..count_rows import CountRows
from ..model import ModelSpec
from ..schema import PHASES, Key, TokenBatch
from .cells import largest, repeated
from .hidden_layers import named_layers, spans
from .megatron_lines import Pass, digest_of, passes_of
from .ranks import check_ranks, first_of_each
from .source import Given, naming

__all__ = ["RouterCounts", "RouterTokens", "open_source", "recognises"]

UNSORTED = (
    "a token's experts come in the order of their ids where the router gave a mask, not of their gates, and requests"
    " are unknown: what follows a token's first choice (exflow, coherent dispatch) needs another recording"
)

UNCHECKED = "layers taken as numbered: pipeline stages that count from 0 each would be mixed; --hf-config checks"


def recognises(head: bytes) -> bool:
    """Whether a file begins with a router's line."""
    return head.lstrip().startswith(b"{") and b'"stage"' in head and b'"top_indices"' in head


def open_source(given: Given) -> "RouterTokens | RouterCounts":
    """The recording in the files of all ranks.

    Raises
    ------
    InputError
        Damaged, not of all ranks, or a rank twice.
    """
    files: dict[int, Path] = {}
    firsts: dict[int, Pass] = {}
    for path in given.files:
        with naming(path):
            first = next(passes_of(path), None)
            if first is None:
                raise InputError("no line of a decoder layer; expected what a router chose")
            if first.rank in files:
                raise InputError(f"rank {first.rank} as in {files[first.rank].name}: counted double")
            files[first.rank], firsts[first.rank] = path, first
    check_ranks(files)
    ranks, notes = first_of_each((rank, digest_of(path)) for rank, path in files.items())
    recording = _Recording({rank: files[rank] for rank in ranks}, firsts, notes)
    is_coupled = len({firsts[rank].layers for rank in ranks}) == 1
    return RouterTokens(recording, given.model) if is_coupled else RouterCounts(recording, given.model)


class _Recording:
    """The files of the ranks that count, and their passes; `notes` says what the last reading of them left out."""

    def __init__(self, files: dict[int, Path], firsts: dict[int, Pass], repeated_ranks: list[str]) -> None:
        self._files, self._firsts, self.repeated_ranks = files, firsts, repeated_ranks
        widths = {firsts[rank].ids.shape[2] for rank in files}
        if len(widths) > 1:
            raise InputError(f"ranks of top-{min(widths)} and of top-{max(widths)}; expected one model")
        self.top_k = widths.pop()
        self.layers = frozenset(chain.from_iterable(firsts[rank].layers for rank in files))
        self.notes: list[str] = []

    def passes(self) -> Iterator[Pass]:
        """The passes of each rank in turn, none a repetition, each with the layers of the rank's first."""
        num_repeated, num_cut = 0, 0
        for rank, path in self._files.items():
            with naming(path):
                stream = passes_of(path)
                for found in stream:
                    if set(found.layers) < set(self._firsts[rank].layers) and next(stream, None) is None:
                        num_cut += 1
                        break
                    self._check(found, rank)
                    num_repeated += found.is_repeated
                    if len(found.ids) and not found.is_repeated:
                        yield found
        told = {"that repeat one of their step (recomputed activations)": num_repeated, "cut off at the end": num_cut}
        self.notes = [f"{number:,} passes {what} left out" for what, number in told.items() if number]

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed."""
        return max((largest(found.ids) for found in self.passes()), default=-1)

    def _check(self, found: Pass, rank: int) -> None:
        """Hold a pass against the first one of its rank."""
        expected = self._firsts[rank]
        if (found.rank, found.layers, found.ids.shape[2]) != (rank, expected.layers, self.top_k):
            raise InputError(
                f"line {found.number}: rank {found.rank}, layers {spans(found.layers)}, top-{found.ids.shape[2]};"
                f" expected as before rank {rank}, layers {spans(expected.layers)}, top-{self.top_k}"
            )


class RouterTokens:
    """Tokens of all ranks; see `Source`."""

    has_weights = False
    choice_order: Literal["unknown"] = "unknown"

    def __init__(self, recording: _Recording, model: ModelSpec | None) -> None:
        self._recording = recording
        layers = named_layers(recording.layers, model)
        self._columns = np.flatnonzero(np.isin(sorted(recording.layers), layers.recorded))
        self.model: dict[str, Any] = {"layer_ids": layers.ids, "top_k": recording.top_k}
        self.notes = [*recording.repeated_ranks, *layers.notes, UNSORTED, *([] if model else [UNCHECKED])]

    def largest_id(self) -> int:
        """The largest expert id: a pass over the files."""
        return self._recording.largest_id()

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens by rank and step; positions are their numbers in a pass."""
        twice = 0
        for found in self._recording.passes():
            ids_TLK = found.ids[:, self._columns]
            count, twice = len(ids_TLK), twice + repeated(ids_TLK)
            yield TokenBatch(
                step=np.full(count, found.step, np.int32),
                sample=None,
                position=np.arange(count, dtype=np.int32),
                source_rank=np.full(count, found.rank, np.int32),
                phase=np.full(count, PHASES.index(phase), np.int8),
                ids=ids_TLK,
            )
        self.notes += self._recording.notes
        if twice:
            self.notes.append(f"{twice:,} cells name an expert twice, which counts twice")


class RouterCounts:
    """Counts of all ranks, of which each has layers of its own; see `CountSource`."""

    step_order: Literal["known"] = "known"

    def __init__(self, recording: _Recording, model: ModelSpec | None) -> None:
        self._recording = recording
        layers = named_layers(recording.layers, model)
        self._ordinals = {name: place for place, name in enumerate(layers.recorded)}
        self.model: dict[str, Any] = {"layer_ids": layers.ids, "top_k": recording.top_k}
        stages = "ranks recorded different layers (pipeline stages), whose tokens cannot be joined: counted"
        self.notes = [*recording.repeated_ranks, *layers.notes, stages]

    def largest_id(self) -> int:
        """The largest expert id: a pass over the files."""
        return self._recording.largest_id()

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts by step and rank, passes of a step added up."""
        keys: tuple[Key, ...] = ("step", "source_rank")
        rows = CountRows(len(keys) + 1, (num_experts,))
        for found in self._recording.passes():
            if (highest := largest(found.ids)) >= num_experts:
                raise InputError(f"line {found.number}: expert {highest}; expected 0 to {num_experts - 1}")
            for place, name in enumerate(found.layers):
                if name in self._ordinals:
                    key_RB = np.array([[found.step, found.rank, self._ordinals[name]]], np.int64)
                    counts_E = np.bincount(found.ids[:, place].ravel(), minlength=num_experts)[:num_experts]
                    for full in rows.add(key_RB, counts_E[None]):
                        yield CountTable.of(keys, *full)
        yield CountTable.of(keys, *rows.taken())
        self.notes += self._recording.notes
