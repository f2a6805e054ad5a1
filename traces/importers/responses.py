"""Importer of responses of SGLang and vLLM with the routing of their tokens, JSON lines; see `response_lines`.

A response is a sample. The last token of each was generated and never routed.

Legend: T tokens of a response; H hidden layers; L MoE layers; K experts per token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..model import MAX_LAYERS, NOT_ROUTED, ModelSpec
from ..schema import PHASES, TokenBatch
from .cells import UNORDERED, expert_ids, largest
from .hidden_layers import check_routed, with_experts
from .response_lines import Response, responses_of, routing_of
from .source import BLOCK_BYTES, Given, TokenSource, naming


def recognises(head: bytes) -> bool:
    """Check whether a file begins with JSON in which routing is named."""
    return head.lstrip()[:1] in (b"{", b"[") and b'"routed_experts"' in head


def open_source(given: Given) -> "ResponseSource":
    """The responses of one or more files, the first of which says what the others must be like.

    Raises UsageError where the model's config.json is needed.
    """
    return ResponseSource(given.files, given.model)


class ResponseSource(TokenSource):
    """Tokens of responses."""

    def __init__(self, files: tuple[Path, ...], model: ModelSpec | None) -> None:
        self._files, self._model = files, model
        first = next(self._responses(), None)
        if first is None:
            raise InputError("no response; expected one a line")
        self._shape = routing_of(first, model).shape[1:]
        self._has_rank = first.source_rank is not None
        if self._shape[0] > MAX_LAYERS:
            raise InputError(f"{self._shape[0]:,} layers; expected at most {MAX_LAYERS:,}")
        self._layers = with_experts(self._shape[0], model)
        self.model = {"layer_ids": self._layers, "top_k": self._shape[1]}
        self.notes = ["steps are unknown" if self._has_rank else "steps and source ranks are unknown", UNORDERED]

    def largest_id(self) -> int:
        """The largest expert id: a pass over the files."""
        return max((largest(expert_ids(ids)) for _, ids in self._routed() if ids.size), default=-1)

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens by response; those of the prompt are prefill, where it is known how many there are."""
        filled_H, untold = np.zeros(self._shape[0], np.bool_), 0
        rows = max(1, BLOCK_BYTES // (4 * self._shape[0] * self._shape[1]))
        for sample, (response, whole_THK) in enumerate(self._routed()):
            begin = _first_position(response, len(whole_THK))
            untold += response.prompt_tokens is None
            for first in range(0, len(whole_THK), rows):
                ids_THK = expert_ids(whole_THK[first : first + rows])
                filled_H |= ((ids_THK > 0) & (ids_THK < NOT_ROUTED)).any(axis=(0, 2))
                position_T = np.arange(begin + first, begin + first + len(ids_THK), dtype=np.int32)
                yield TokenBatch(
                    step=None,
                    sample=np.full(len(ids_THK), sample, np.int64),
                    position=position_T,
                    source_rank=np.full(len(ids_THK), response.source_rank, np.int32) if self._has_rank else None,
                    phase=_phases(position_T, response.prompt_tokens, phase),
                    ids=ids_THK[:, self._layers],
                )
        check_routed(filled_H, self._model)
        if untold:
            self.notes.append(f"{untold:,} responses do not tell the length of their prompt: {phase} taken")

    def _routed(self) -> Iterator[tuple[Response, NDArray[Any]]]:
        """The responses and their routing `[T, H, K]`, each like the first."""
        for response in self._responses():
            ids_THK = routing_of(response, self._model)
            if ids_THK.shape[1:] != self._shape or (response.source_rank is not None) != self._has_rank:
                raise InputError(
                    f"line {response.number}: {ids_THK.shape[1]} layers, top-{ids_THK.shape[2]}, dp_rank"
                    f" {response.source_rank}; the first response has {self._shape[0]}, top-{self._shape[1]} and"
                    f" {'a' if self._has_rank else 'no'} dp_rank"
                )
            yield response, ids_THK

    def _responses(self) -> Iterator[Response]:
        seen = set[int]()
        for path in self._files:
            with naming(path.name):
                yield from responses_of(path, seen)


def _first_position(response: Response, num_rows: int) -> int:
    """The position of the first row: rows are of the last tokens but one, from wherever the request asked."""
    if response.total_tokens is None:
        return 0
    begin = response.total_tokens - 1 - num_rows
    if begin < 0:
        raise InputError(
            f"line {response.number}: routing of {num_rows:,} tokens in a response of {response.total_tokens:,};"
            " expected all but the last at most"
        )
    return begin


def _phases(position_T: NDArray[np.int32], prompt_tokens: int | None, phase: str) -> NDArray[np.int8]:
    if prompt_tokens is None:
        return np.full(len(position_T), PHASES.index(phase), np.int8)
    prefill, decode = PHASES.index("prefill"), PHASES.index("decode")
    return np.where(position_T < prompt_tokens, prefill, decode).astype(np.int8)
