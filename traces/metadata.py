"""Metadata of a part: the JSON under the metadata key `moeplan`, read with suspicion."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import InputError, MoeplanError
from ..files import size_of, validated
from .schema import METADATA_KEY, TraceMeta

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["parse_meta", "read_meta", "refusing"]

MAX_METADATA_BYTES = 2**20


def read_meta(path: str | os.PathLike[str]) -> TraceMeta:
    """The metadata of a local part.

    Raises
    ------
    InputError
        The file is no part of a trace.
    """
    import pyarrow.parquet as pq

    size_of(path, what="a trace")
    with refusing(str(path)), pq.ParquetFile(path) as part:
        return parse_meta(part.schema_arrow)


def parse_meta(schema: "pa.Schema") -> TraceMeta:
    """The metadata in an Arrow schema.

    Raises
    ------
    InputError
        There is none, or it is of another version, or damaged.
    """
    found: Mapping[bytes, bytes] = schema.metadata or {}
    text = found.get(METADATA_KEY)
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
