"""Importer of JSON lines: an object a token, or an object a token and layer; see `TokenLine` for the keys.

The first line may be `{"model": {...}}`, which says of the model what `ModelSpec` names: num_experts, layer_ids, ...

Legend: T tokens; L MoE layers; K experts per token.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..model import NOT_ROUTED
from ..schema import PHASES, TokenBatch
from .cells import expert_ids, gates, largest
from .json_tokens import Token, model_of, tokens
from .source import BLOCK_BYTES, Given, TokenSource

VALUE_BYTES = 64  # of a number in a list, id and weight together
MAX_ROWS = 8192
MAX_NAMES = 8  # of keys left out that are told


def recognises(head: bytes) -> bool:
    """Check whether a file begins with an object."""
    return head.lstrip().startswith(b"{")


def open_source(given: Given) -> "JsonLinesSource":
    """The tokens in a file, the first of which says what the others must be like."""
    return JsonLinesSource(given.file)


class JsonLinesSource(TokenSource):
    """Tokens of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        first = next(tokens(path), None)
        if first is None:
            raise InputError("no token; expected an object a line with experts")
        self._traits = _traits(first)
        self._num_layers, self._top_k = len(first.experts), len(first.experts[0])
        self._known = {name: getattr(first.line, name) is not None for name in ("step", "sample", "source_rank")}
        self.has_weights = first.weights is not None
        self.model = _model(path, first)
        self.notes = []
        if first.line.position is None:
            self.notes.append("no position: positions are numbers of tokens")
        if isinstance(first.line.sample, str):
            self.notes.append("samples have names: their ids are hashes of these")
        self._left_out: set[str] = set()

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed: a pass over the file."""
        return max(largest(expert_ids(np.array(token.experts))) for token in self._checked())

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens in order."""
        checked, first_row = self._checked(), 0
        rows = max(1, min(MAX_ROWS, BLOCK_BYTES // (VALUE_BYTES * self._num_layers * self._top_k)))
        while chunk := list(islice(checked, rows)):
            weights = [token.weights for token in chunk] if self.has_weights else None
            yield TokenBatch(
                step=self._column(chunk, "step", np.int32),
                sample=self._column(chunk, "sample", np.int64),
                position=_positions(chunk, first_row),
                source_rank=self._column(chunk, "source_rank", np.int32),
                phase=np.array([PHASES.index(token.line.phase or phase) for token in chunk], np.int8),
                ids=expert_ids(np.array([token.experts for token in chunk])),
                weights=None if weights is None else gates(np.array(weights, np.float64)),
            )
            first_row += len(chunk)
        if self._left_out:
            self.notes.append(f"keys left out: {', '.join(sorted(self._left_out))}")

    def _column(self, chunk: list[Token], name: str, kind: type[np.integer[Any]]) -> NDArray[Any] | None:
        if not self._known[name]:
            return None
        return np.array([_number(getattr(token.line, name)) for token in chunk], kind)

    def _checked(self) -> Iterator[Token]:
        """The tokens, each like the first."""
        limit = self.model.get("num_experts", NOT_ROUTED)
        for token in tokens(self._path):
            for name, trait in _traits(token).items():
                if trait != self._traits[name]:
                    raise InputError(
                        f"line {token.number}: {name}: {trait[:80]}; the first token has {self._traits[name][:80]}"
                    )
            if (highest := max(max(row) for row in token.experts)) >= limit and highest != NOT_ROUTED:
                raise InputError(f"line {token.number}: expert {highest}; the header says there are {limit}")
            if token.line.model_extra and len(self._left_out) < MAX_NAMES:
                self._left_out.update(name[:40] for name in islice(token.line.model_extra, MAX_NAMES))
            yield token


def _model(path: Path, first: Token) -> dict[str, Any]:
    """Model facts from the header and from the first token, checked against each other."""
    layer_ids = first.layers or tuple(range(len(first.experts)))
    header = model_of(path)
    header_ids = header.get("layer_ids", list(layer_ids))
    if len(header_ids) != len(layer_ids) or (first.layers and header_ids != list(layer_ids)):
        raise InputError(f"the header's layer_ids are not those of the {len(layer_ids)} layers of line {first.number}")
    if header.get("top_k", len(first.experts[0])) != len(first.experts[0]):
        raise InputError(f"the header's top_k is not the {len(first.experts[0])} experts of line {first.number}")
    return header | {"layer_ids": header_ids, "top_k": len(first.experts[0])}


def _traits(token: Token) -> dict[str, str]:
    """Traits that all tokens of a file have in common."""
    words = {int: "a number", str: "a name", type(None): "none"}
    return {
        "layers": f"{len(token.experts)}{' ' if token.layers else ''}{token.layers or ''}",
        "experts per layer": str(len(token.experts[0])),
        "weights": "none" if token.weights is None else "some",
    } | {name: words[type(getattr(token.line, name))] for name in ("step", "sample", "position", "source_rank")}


def _number(value: int | str) -> int:
    """A sample's id; of a name 63 bits of its SHA-256."""
    if isinstance(value, int):
        return value
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:8]) >> 1


def _positions(chunk: list[Token], first_row: int) -> NDArray[np.int32]:
    positions = [token.line.position for token in chunk]
    return np.array([row if at is None else at for row, at in enumerate(positions, first_row)], np.int32)
