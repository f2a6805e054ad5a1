"""The Parquet schema of a trace, its metadata, read with suspicion, a batch of it in memory, and the rules for both.

Legend: T tokens; L MoE layers; K experts per token.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ..errors import InputError, MoeplanError
from ..files import validated
from .model import MAX_NAME, NOT_ROUTED, ModelSpec

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"moeplan"
MAX_METADATA_BYTES = 2**20
MAX_COUNT = 2**40  # of the count form: leaves room to add them up
PHASES = ("prefill", "decode", "train")
FLOAT16_EXPONENT = 0x7C00  # all exponent bits set: infinite or NaN
RANK_BITS = 40  # sample ids that ranks need not agree on are rank << 40 | ordinal
Key = Literal["step", "sample", "source_rank"]
KEYS: tuple[Key, ...] = ("step", "sample", "source_rank")  # columns that may be unknown
Text = Annotated[str, Field(max_length=MAX_NAME, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]  # steers no terminal


class TraceMeta(BaseModel):
    """Metadata of every part of a trace, as JSON under the metadata key `moeplan`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    form: Literal["tokens", "counts"]
    model: ModelSpec
    tokenizer: Text | None = None
    recorder: Text
    step_order: Literal["known", "unknown"] = "known"  #: Whether steps are numbered as they came
    #: Whether a token's experts are ordered by gate weight; where not, none of them is the first
    choice_order: Literal["gate", "unknown"] = "gate"

    def to_json(self) -> str:
        """The metadata as written; `choice_order` only where it is unknown, so that files stay what they were."""
        return self.model_dump_json(exclude={"choice_order"} if self.choice_order == "gate" else None)


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length; None where a column is unknown."""

    def select(self, rows: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Self:
        """Select these rows."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column[rows] for name, column in columns.items() if column is not None})


@dataclass(frozen=True, slots=True)
class TokenBatch(Rows):
    """Consecutive tokens of a trace; None where a column is unknown."""

    #: step, sample, position, source_rank: `[T]`: int32, int64, int32, int32
    step: NDArray[np.int32] | None
    sample: NDArray[np.int64] | None
    position: NDArray[np.int32]
    source_rank: NDArray[np.int32] | None
    phase: NDArray[np.int8]  #: int8 `[T]`, an index into `PHASES`
    #: uint16 `[T, L', K]` for the layers asked for, largest gate weight first, 65535 = not routed
    ids: NDArray[np.uint16]
    weights: NDArray[np.float16] | None = None  #: float16 `[T, L', K]`, or None

    def __len__(self) -> int:
        return len(self.position)


def check_tokens(batch: TokenBatch, num_experts: int, first_row: int) -> None:
    """Hold the values of a batch against the rules of a trace.

    Parameters
    ----------
    first_row
        The batch's first row, for the message.

    Raises InputError where an expert id is neither below `num_experts` nor 65535, a weight is not finite, a position is
    negative, or a phase is unknown.
    """
    for layer in range(batch.ids.shape[1]):
        ids_TK = batch.ids[:, layer]
        if ids_TK.size and ids_TK.max() >= num_experts:
            wrong_TK = (ids_TK >= num_experts) & (ids_TK != NOT_ROUTED)
            expert = ids_TK[wrong_TK][0] if wrong_TK.any() else None
            expected = f"expected 0 to {num_experts - 1}, or {NOT_ROUTED} for not routed"
            _refuse_where(wrong_TK, f"goes to expert {expert} in layer {layer}; {expected}", first_row)
        if batch.weights is not None:
            _refuse_where(
                batch.weights[:, layer].view(np.uint16) & FLOAT16_EXPONENT == FLOAT16_EXPONENT,
                f"has a weight in layer {layer} that is not finite; expected a number",
                first_row,
            )
    _refuse_where(batch.position < 0, "has a negative position; expected 0 or more", first_row)
    _refuse_where(
        (batch.phase < 0) | (batch.phase >= len(PHASES)),
        f"has no phase; expected one of {', '.join(PHASES)}",
        first_row,
    )


def check_counts(layer: NDArray[np.int32], counts: NDArray[np.int64], num_layers: int) -> None:
    """Hold rows of the count form against its rules: layers `[R]` of the model, counts `[R, E]` of 0 to `MAX_COUNT`."""
    _refuse_where((layer < 0) | (layer >= num_layers), f"names a layer outside 0 to {num_layers - 1}", 0)
    _refuse_where(counts < 0, "has a negative count; expected 0 or more", 0)
    _refuse_where(counts > MAX_COUNT, f"has a count above {MAX_COUNT:,}; expected at most that", 0)


def token_schema(meta: TraceMeta, *, weights: bool) -> "pa.Schema":
    """The Arrow schema of a token trace: one row a token."""
    import pyarrow as pa

    top_k = meta.model.top_k
    columns: list[tuple[str, Any]] = [
        ("step", pa.int32()),
        ("sample", pa.int64()),
        ("position", pa.int32()),
        ("source_rank", pa.int32()),
        ("phase", pa.dictionary(pa.int8(), pa.string())),
    ]
    columns += [(f"layer_{layer}", pa.list_(pa.uint16(), top_k)) for layer in range(meta.model.num_layers)]
    if weights:
        columns += [(f"weight_{layer}", pa.list_(pa.float16(), top_k)) for layer in range(meta.model.num_layers)]
    return pa.schema(columns, metadata=_metadata(meta))


def count_schema(meta: TraceMeta) -> "pa.Schema":
    """The Arrow schema of the count form: one row a layer (and step, sample, source rank where known)."""
    import pyarrow as pa

    counts = pa.list_(pa.int64(), meta.model.num_experts)
    columns = [
        ("step", pa.int32()),
        ("sample", pa.int64()),
        ("source_rank", pa.int32()),
        ("layer", pa.int32()),
        ("counts", counts),
    ]
    return pa.schema(columns, metadata=_metadata(meta))


def parse_meta(schema: "pa.Schema") -> TraceMeta:
    """The metadata in an Arrow schema; InputError where there is none, or it is of another version, or damaged."""
    metadata: Mapping[bytes, bytes] = schema.metadata or {}
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise InputError("Parquet without metadata of moeplan; expected a trace of moeplan trace record or import")
    if len(text) > MAX_METADATA_BYTES:
        raise InputError(f"metadata of {len(text):,} bytes; expected at most {MAX_METADATA_BYTES:,}")
    return validated(TraceMeta, text, source="metadata", what="a trace")


@contextlib.contextmanager
def refusing(source: str) -> Iterator[None]:
    """Turn whatever Arrow says of a file into one line that names it."""
    import pyarrow as pa

    try:
        yield
    except MoeplanError as error:
        raise type(error)(f"{source}: {error}") from error
    except (OSError, pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{source}: cannot be read as a trace ({reason})") from error


def _refuse_where(wrong: NDArray[Any], what: str, first_row: int) -> None:
    if wrong.any():
        row = first_row + int(np.argwhere(wrong)[0][0])
        raise InputError(f"row {row} {what}")


def _metadata(meta: TraceMeta) -> dict[bytes, bytes]:
    return {METADATA_KEY: meta.to_json().encode()}
