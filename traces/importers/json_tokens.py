"""The lines of a JSON-lines recording as tokens.

Legend: L MoE layers; K experts per token.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...errors import InputError
from ...files import validated
from ..model import MAX_LAYERS, NOT_ROUTED
from .source import numbered_lines

MAX_LINE_BYTES = 4 * 2**20
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Expert = Annotated[int, Field(ge=-1, le=NOT_ROUTED)]
Gate = Annotated[float, Field(ge=-65504, le=65504)]  # what float16 holds


class TokenLine(BaseModel):
    """A line: a token, or with `layer` a token in one layer. Other keys are left out."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    #: A number, or a name, whose id is then made of its hash
    sample: Int64 | Annotated[str, Field(max_length=4096)] | None = None
    step: Int32 | None = None
    #: In the sample; the number of the token where no line has one
    position: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    source_rank: Int32 | None = None
    phase: Literal["prefill", "decode", "train"] | None = None
    layer: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    experts: list[list[Expert]] | list[Expert]  #: `[[e, ...K], ...L]`, or with `layer` `[e, ...K]`; -1 is not routed
    weights: list[list[Gate]] | list[Gate] | None = None  #: Gate weights in the same shape


class _ModelFacts(BaseModel):
    """Facts about the model in a header: fields of `ModelSpec`, of which importers read these."""

    model_config = ConfigDict(extra="allow")

    layer_ids: list[int] | None = None
    num_experts: int | None = None
    attention: dict[str, Any] = {}


class _Header(BaseModel):
    """The first line, where it is about the model."""

    model: _ModelFacts


@dataclass(frozen=True, slots=True)
class Token:
    """A token and the number of its (first) line; `layers` is None where its lines do not name them."""

    number: int
    line: TokenLine
    layers: tuple[int, ...] | None
    experts: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]] | None


def tokens(path: Path) -> Iterator[Token]:
    """The tokens of a file in order, each held against the form of its line but not against the others.

    Raises InputError where a line is no token; it is named.
    """
    lines = (
        (number, validated(TokenLine, text, source=f"line {number}", what="a token"))
        for number, text in _lines(path)
        if number > 1 or not _is_header(text)
    )
    for _, group in groupby(lines, key=_token_key):
        yield _token(list(islice(group, MAX_LAYERS + 1)))


def model_of(path: Path) -> dict[str, Any]:
    """Facts about the model in the header of a file; none where there is no header."""
    number, text = next(_lines(path))
    if not _is_header(text):
        return {}
    return validated(_Header, text, source=f"line {number}", what="a header").model.model_dump(exclude_none=True)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers, stripped, and without a byte order mark."""
    for number, line in numbered_lines(path, MAX_LINE_BYTES):
        if text := line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
            yield number, text


def _is_header(text: bytes) -> bool:
    """Check whether a line is an object whose first key is model; tokens have other keys."""
    return text[1:].lstrip().startswith(b'"model"')


def _token_key(numbered: tuple[int, TokenLine]) -> Any:
    """Key that consecutive lines of one token have in common."""
    number, line = numbered
    return number if line.layer is None else (line.step, line.sample, line.position, line.source_rank)


def _token(lines: list[tuple[int, TokenLine]]) -> Token:
    """The token of one line, or of a line a layer."""
    number, first = lines[0]
    experts: Sequence[Any] = first.experts
    weights: Sequence[Any] | None = first.weights
    layers = None
    if first.layer is not None:
        by_layer = {line.layer: line for _, line in lines if line.layer is not None}
        if len(by_layer) != len(lines) or len(lines) > MAX_LAYERS:
            raise InputError(
                f"line {number}: a token of {len(lines)} lines in {len(by_layer)} layers; expected one a layer, and"
                " tokens told apart by step, sample, position or source_rank"
            )
        layers = tuple(sorted(by_layer))
        experts = [by_layer[layer].experts for layer in layers]
        unweighted = all(line.weights is None for line in by_layer.values())
        weights = None if unweighted else [by_layer[layer].weights or [] for layer in layers]
    width = len(experts[0]) if experts and isinstance(experts[0], list) else 0
    if not _is_table(experts, width):
        raise InputError(f"line {number}: experts of another shape than [[e, ...], ...], or [e, ...] with a layer")
    if weights is not None and not (len(weights) == len(experts) and _is_table(weights, width)):
        raise InputError(f"line {number}: weights of another shape than experts; expected one for each")
    return Token(number, first, layers, experts, weights)


def _is_table(rows: Sequence[Any], width: int) -> bool:
    """Check whether these are rows of `width` numbers each."""
    alike = all(isinstance(row, list) and len(row) == width for row in rows)
    return width > 0 and alike and not any(isinstance(row[0], list) for row in rows)
