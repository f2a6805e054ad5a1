"""The lines of Megatron-LM's `router_trace_rank{N}.jsonl`: a rank's choices in a layer, put together to passes.

Legend: T tokens; L layers; K experts per token.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ...errors import InputError
from ...files import validated
from ...workers import SERIAL, Workers
from ..model import MAX_LAYERS, NOT_ROUTED
from .source import parsed_lines

MAX_LINE_BYTES = 64 * 2**20
MAX_STEP_BYTES = 2**30
RANK = re.compile(rb'"rank": ?[0-9]+')
Int32 = Annotated[int, Field(ge=0, lt=2**31)]


class RouterLine(BaseModel):
    """A line: what one rank's router in one layer chose for its tokens."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    step: Int32
    stage: Literal["pre_dispatch"]
    block: Literal["decoder", "mtp"]
    layer: Int32
    rank: Annotated[int, Field(ge=0, lt=2**20)]
    num_tokens: Annotated[int, Field(ge=0)]
    topk: Annotated[int, Field(ge=1, lt=NOT_ROUTED)]
    top_indices: list[list[Annotated[int, Field(ge=-1, lt=NOT_ROUTED)]]]


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of one rank's router in one layer, from a line."""

    number: int
    step: int
    rank: int
    layer: int
    ids: NDArray[np.uint16]  #: uint16 `[T, K]`


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of one rank."""

    number: int
    step: int
    rank: int
    layers: tuple[int, ...]  #: Ascending, as the file numbers them
    ids: NDArray[np.uint16]  #: uint16 `[T, L, K]`
    #: Whether it is a pass of its step once more, which recomputing activations in the backward pass gives
    is_repeated: bool


def passes_of(path: Path, workers: Workers = SERIAL) -> Iterator[Pass]:
    """The passes of a rank in order, each held against the form of its lines; what MTP blocks chose is left out.

    Raises InputError where a line is none of such a recording, or steps do not ascend; it is named.
    """
    cells: dict[int, NDArray[np.uint16]] = {}
    seen, step, num_bytes = set[bytes](), -1, 0
    first: Choices | None = None
    for line in parsed_lines(_choices, path, MAX_LINE_BYTES, workers):
        if line.step < step:
            reason = f"step {line.step} after step {step}; expected one recording, in order"
            raise InputError(f"line {line.number}: {reason}")
        if first is not None and (line.step != step or line.layer in cells):
            yield _pass(first, cells, seen)
            cells, first = {}, None
        if line.step != step:
            step, num_bytes = line.step, 0
            seen.clear()
        first = first or line
        cells[line.layer] = line.ids
        num_bytes += line.ids.nbytes
        if num_bytes > MAX_STEP_BYTES or len(cells) > MAX_LAYERS:
            raise InputError(
                f"line {line.number}: over {MAX_STEP_BYTES:,} bytes or {MAX_LAYERS:,} layers in step {step}"
            )
    if first is not None:
        yield _pass(first, cells, seen)


def digest_of(path: Path) -> bytes:
    """A hash of everything in a file but the rank, of which it may be another's copy."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            digest.update(RANK.sub(b"", line, count=1))
    return digest.digest()


def _choices(number: int, text: bytes) -> Choices | None:
    """The choices in a line; None for an MTP block."""
    line = validated(RouterLine, text, source=f"line {number}", what="a router's choices")
    if line.block != "decoder":
        return None
    if len(line.top_indices) != line.num_tokens or any(len(row) != line.topk for row in line.top_indices):
        raise InputError(f"line {number}: top_indices is not of {line.num_tokens} tokens with {line.topk} experts each")
    ids_TK = np.array(line.top_indices, np.int32).reshape(line.num_tokens, line.topk)
    routed_TK = np.where(ids_TK < 0, NOT_ROUTED, ids_TK).astype(np.uint16)
    return Choices(number, line.step, line.rank, line.layer, routed_TK)


def _pass(first: Choices, cells: dict[int, NDArray[np.uint16]], seen: set[bytes]) -> Pass:
    """The lines of one pass together; `seen` has the hashes of its step's others."""
    shapes = {ids_TK.shape for ids_TK in cells.values()}
    if len(shapes) > 1:
        raise InputError(
            f"line {first.number}: layers of {sorted(shapes)[:2]} tokens and experts in one pass; expected one"
        )
    layers = tuple(sorted(cells))
    ids_TLK = np.stack([cells[layer] for layer in layers], axis=1)
    digest = hashlib.sha256(repr(layers).encode() + ids_TLK.tobytes()).digest()
    is_repeated = digest in seen and ids_TLK.size > 0
    seen.add(digest)
    return Pass(first.number, first.step, first.rank, layers, ids_TLK, is_repeated)
