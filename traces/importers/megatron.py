"""Importer of Megatron-LM's `router_trace_rank*.jsonl`, a file a rank, a line a step, block and layer.

Tokens, where every rank has the same layers; counts, where pipeline stages recorded their own: their tokens cannot be
joined.

Legend: T tokens; L MoE layers; K experts per token; E experts.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from ...errors import InputError
from ...workers import Workers
from ..count_form import CountTable
from ..loads import CountRows
from ..model import ModelSpec
from ..schema import PHASES, Key, TokenBatch
from .cells import largest
from .hidden_layers import named_layers, spans
from .megatron_lines import Pass, digest_of, passes_of
from .source import CountSource, Given, Source, TokenSource, check_ranks, first_of_each, naming

UNSORTED = (
    "a token's experts come in the order of their ids where the router gave a mask, not of their gates, and requests"
    " are unknown: what follows a token's first choice (exflow, coherent dispatch) needs another recording"
)
UNCHECKED = "layers taken as numbered: pipeline stages that count from 0 each would be mixed; --hf-config checks"
STAGES = "ranks recorded different layers (pipeline stages), whose tokens cannot be joined: counted"


def recognises(head: bytes) -> bool:
    """Check whether a file begins with a router's line."""
    return head.lstrip().startswith(b"{") and b'"stage"' in head and b'"top_indices"' in head


def open_source(given: Given) -> "RouterTokens | RouterCounts":
    """The recording in the files of all ranks."""
    files: dict[int, Path] = {}
    firsts: dict[int, Pass] = {}
    for path in given.files:
        with naming(path.name):
            first = next(passes_of(path), None)
            if first is None:
                raise InputError("no line of a decoder layer; expected what a router chose")
            if first.rank in files:
                raise InputError(f"rank {first.rank} as in {files[first.rank].name}: counted double")
            files[first.rank], firsts[first.rank] = path, first
    check_ranks(files)
    ranks, notes = first_of_each((rank, digest_of(path)) for rank, path in files.items())
    is_coupled = len({firsts[rank].layers for rank in ranks}) == 1
    kind = RouterTokens if is_coupled else RouterCounts
    source = kind({rank: files[rank] for rank in ranks}, firsts, given.model, given.workers)
    kind_notes = [STAGES] if not is_coupled else [UNSORTED] if given.model else [UNSORTED, UNCHECKED]
    source.notes = [*notes, *source.notes, *kind_notes]
    return source


class _Router(Source):
    """The files of the ranks that count, and the first pass of each."""

    def __init__(
        self, files: dict[int, Path], firsts: dict[int, Pass], model: ModelSpec | None, workers: Workers
    ) -> None:
        self._files, self._firsts, self._workers = files, firsts, workers
        widths = {firsts[rank].ids.shape[2] for rank in files}
        if len(widths) > 1:
            raise InputError(f"ranks of top-{min(widths)} and of top-{max(widths)}; expected one model")
        layers = named_layers(set(chain.from_iterable(firsts[rank].layers for rank in files)), model)
        self._recorded = layers.recorded
        self.model = {"layer_ids": layers.ids, "top_k": widths.pop()}
        self.notes = [*layers.notes]
        self._left_out: list[str] = []  # by the last reading

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed: a pass over the files."""
        return max((largest(routed.ids) for routed in self._passes()), default=-1)

    def _passes(self) -> Iterator[Pass]:
        """The passes of each rank in turn, none a repetition, each with the layers of the rank's first."""
        num_repeated, num_cut = 0, 0
        for rank, path in self._files.items():
            with naming(path.name):
                stream = passes_of(path, self._workers)
                for routed in stream:
                    if set(routed.layers) < set(self._firsts[rank].layers) and next(stream, None) is None:
                        num_cut += 1
                        break
                    self._check(routed, rank)
                    num_repeated += routed.is_repeated
                    if len(routed.ids) and not routed.is_repeated:
                        yield routed
        left_out = {
            "that repeat one of their step (recomputed activations)": num_repeated,
            "cut off at the end": num_cut,
        }
        self._left_out = [f"{number:,} passes {what} left out" for what, number in left_out.items() if number]

    def _check(self, routed: Pass, rank: int) -> None:
        """Hold a pass against the first one of its rank."""
        layers, top_k = self._firsts[rank].layers, self.model["top_k"]
        if (routed.rank, routed.layers, routed.ids.shape[2]) != (rank, layers, top_k):
            raise InputError(
                f"line {routed.number}: rank {routed.rank}, layers {spans(routed.layers)}, top-{routed.ids.shape[2]};"
                f" expected as before rank {rank}, layers {spans(layers)}, top-{top_k}"
            )


class RouterTokens(_Router, TokenSource):
    """Tokens of all ranks."""

    choice_order = "unknown"

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens by rank and step; positions are their numbers in a pass."""
        for routed in self._passes():
            count = len(routed.ids)
            yield TokenBatch(
                step=np.full(count, routed.step, np.int32),
                sample=None,
                position=np.arange(count, dtype=np.int32),
                source_rank=np.full(count, routed.rank, np.int32),
                phase=np.full(count, PHASES.index(phase), np.int8),
                ids=routed.ids[:, np.isin(routed.layers, self._recorded)],
            )
        self.notes += self._left_out


class RouterCounts(_Router, CountSource):
    """Counts of all ranks, of which each has layers of its own."""

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts by step and rank, passes of a step added up."""
        keys: tuple[Key, ...] = ("step", "source_rank")
        ordinals = {name: ordinal for ordinal, name in enumerate(self._recorded)}
        rows = CountRows(len(keys) + 1, (num_experts,))
        for routed in self._passes():
            if (highest := largest(routed.ids)) >= num_experts:
                raise InputError(f"line {routed.number}: expert {highest}; expected 0 to {num_experts - 1}")
            for column, name in enumerate(routed.layers):
                if name in ordinals:
                    key_RB = np.array([[routed.step, routed.rank, ordinals[name]]], np.int64)
                    counts_E = np.bincount(routed.ids[:, column].ravel(), minlength=num_experts)[:num_experts]
                    for full in rows.add(key_RB, counts_E[None]):
                        yield CountTable.of(keys, *full)
        yield CountTable.of(keys, *rows.taken())
        self.notes += self._left_out
