"""A Parquet data set as one thing: its files, what they say of themselves, and batches of their columns.

Nothing is believed: sizes are checked before memory is taken, every part must be of the same model and columns.
"""

import hashlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from ..errors import InputError, MismatchError
from ..files import sha256_json
from .part_file import is_part, is_unfinished, reading_order
from .schema import KEYS, TraceMeta, count_schema, parse_meta, refusing, token_schema

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROW_GROUP_ROWS = 2**27
BATCH_BYTES = 16 * 2**20
BATCH_ROWS = 65_536
VALUE_BYTES = 24  # no column of ours needs more a value, however it is encoded
INSTEAD = {  # of a form that was expected, how to come by it
    "tokens": "counts do not tell which tokens they are of: give the trace that they were counted from",
    "counts": "moeplan trace count makes it",
}
CHUNK_BYTES = 2**20  # and this much beside, for dictionaries and page headers
RUN_VALUES = 2**26  # of a run of parts: about a second of counting


class Stamp(NamedTuple):
    """A part as it was when the trace was opened."""

    num_rows: int
    num_bytes: int
    time_ns: int | None  #: When it was changed last, where the file system tells


@dataclass(frozen=True)
class Dataset:
    """The finished parts of a trace, in the order in which they are read."""

    path: str  #: What was opened: a directory, a file, or a URI
    meta: TraceMeta  #: What all parts say of themselves
    files: tuple[str, ...]  #: Names of the parts
    unfinished: tuple[str, ...]  #: Names of parts whose writer was killed or is still at it; they are not read
    num_rows: int  #: Rows of all parts
    known: frozenset[str]  #: Which of step, sample and source_rank are filled
    has_weights: bool  #: Whether gate weights are there
    folder: str
    filesystem: Any
    stamps: tuple[Stamp, ...]  #: Of every part

    form: ClassVar[str]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Look at every part's footer.

        Raises
        ------
        InputError
            Nothing there, nothing finished, no rows, a part damaged, or the other form.
        MismatchError
            Parts that do not belong together: another model, other columns.
        """
        text = os.fspath(path)
        with refusing(text):
            filesystem, folder, files, unfinished = _parts(text)
        parts = [_look(filesystem, posixpath.join(folder, name), cls.form) for name in files]
        for name, part in zip(files, parts, strict=True):
            if (part.meta, part.known, part.has_weights) != (parts[0].meta, parts[0].known, parts[0].has_weights):
                raise MismatchError(
                    f"{text}: {files[0]} and {name} do not belong together: {_difference(parts[0], part)}"
                )
        stamps = tuple(part.stamp for part in parts)
        num_rows = sum(stamp.num_rows for stamp in stamps)
        if not num_rows:
            raise InputError(f"{text}: zero rows in {len(files)} part(s); expected at least one")
        first = parts[0]
        known, has_weights = first.known, first.has_weights
        return cls(text, first.meta, files, unfinished, num_rows, known, has_weights, folder, filesystem, stamps)

    @cached_property
    def sha256(self) -> str:
        """The hash of the trace: that of the sorted list of (file name, SHA-256)."""
        return sha256_json(sorted([name, self._file_sha256(name, stamp)] for name, stamp in self._parts))

    @property
    def listing_sha256(self) -> str:
        """The hash of the parts' names, rows and bytes, without reading them; copies of a trace have the same."""
        return sha256_json([self.meta.to_json(), *([name, *stamp[:2]] for name, stamp in self._parts)])

    @property
    def _parts(self) -> list[tuple[str, Stamp]]:
        return list(zip(self.files, self.stamps, strict=True))

    def unread(self) -> Self:
        """The trace without what was read of it and kept, to be sent elsewhere."""
        return replace(self)

    def runs(self) -> Iterator[Self]:
        """The trace in runs of whole parts, each about a second's counting; which ones depends on the trace alone."""
        most_rows = RUN_VALUES // self._row_values
        firsts, num_rows = [0], 0
        for number, stamp in enumerate(self.stamps):
            if num_rows and num_rows + stamp.num_rows > most_rows:
                firsts, num_rows = [*firsts, number], 0
            num_rows += stamp.num_rows
        ends = [*firsts[1:], len(self.files)]
        for first, end in zip(firsts, ends, strict=True):  # one at a time: a run may keep its batches
            yield self.of_parts(first, end)

    def of_parts(self, first: int, end: int) -> Self:
        """The trace of some of the parts alone, or of none."""
        if (first, end) == (0, len(self.files)):
            return self
        stamps = self.stamps[first:end]
        num_rows = sum(stamp.num_rows for stamp in stamps)
        return replace(self, files=self.files[first:end], stamps=stamps, num_rows=num_rows)

    @property
    def _row_values(self) -> int:
        """Values of a row, apart from its keys."""
        model = self.meta.model
        return model.num_layers * model.top_k if self.form == "tokens" else model.num_experts

    def read(self, columns: Sequence[str], row_bytes: int) -> Iterator[tuple[str, int, "pa.RecordBatch"]]:
        """Batches of these columns with the part each is from and its first row there, at most 16 MiB each."""
        import pyarrow.parquet as pq

        rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))
        for name, stamp in self._parts:
            path = posixpath.join(self.folder, name)
            with refusing(path):
                first_row = 0
                with (
                    self._opened(path, stamp) as stream,
                    pq.ParquetFile(stream, page_checksum_verification=True) as part,
                ):
                    for batch in part.iter_batches(rows, columns=list(columns)):
                        yield path, first_row, batch
                        first_row += batch.num_rows
                    if first_row != part.metadata.num_rows:
                        raise InputError(f"{first_row} rows, its footer says {part.metadata.num_rows}")

    def _file_sha256(self, name: str, stamp: Stamp) -> str:
        path = posixpath.join(self.folder, name)
        digest = hashlib.sha256()
        with refusing(path), self._opened(path, stamp) as stream:
            while piece := stream.read(2**20):
                digest.update(piece)
        return digest.hexdigest()

    def _opened(self, path: str, stamp: Stamp) -> Any:
        """The file of a part; InputError where it is another than when the trace was opened."""
        stream = self.filesystem.open_input_file(path)
        now = _state(self.filesystem, path)
        if now != stamp[1:]:
            stream.close()
            raise InputError(
                f"changed since the trace was opened ({stamp.num_bytes:,} bytes then, {now[0]:,} now); expected a trace"
                " that nobody writes to: run again once it is whole"
            )
        return stream


def form_of(path: str | os.PathLike[str]) -> str:
    """The form that the first part at `path` says it is of: "tokens" or "counts"; errors as in `Dataset.open`."""
    import pyarrow.parquet as pq

    text = os.fspath(path)
    with refusing(text):
        filesystem, folder, files, _ = _parts(text)
    first = posixpath.join(folder, files[0])
    with refusing(first), filesystem.open_input_file(first) as stream, pq.ParquetFile(stream) as part:
        return parse_meta(part.schema_arrow).form


@dataclass(frozen=True, slots=True)
class _Part:
    """Footer of one part."""

    meta: TraceMeta
    stamp: Stamp
    known: frozenset[str]
    has_weights: bool


def _parts(path: str) -> tuple[Any, str, tuple[str, ...], tuple[str, ...]]:
    """The file system, the folder, the parts in it in reading order, and the unfinished ones."""
    filesystem, folder, names = _listing(path)
    files = tuple(sorted(filter(is_part, names), key=reading_order))
    unfinished = tuple(sorted(filter(is_unfinished, names)))
    if not files:
        if unfinished:
            raise InputError(
                f"no finished part of a trace, {len(unfinished)} unfinished ({unfinished[0]}, ...): their writer was"
                " killed or is still at it; wait for it, or record again"
            )
        raise InputError(
            "no finished part of a trace; expected one part-*.parquet, or a directory of them; moeplan trace import"
            " turns other recordings into a trace"
        )
    return filesystem, folder, files, unfinished


def _listing(path: str) -> tuple[Any, str, list[str]]:
    """The file system, the folder and the names in it (one name, where a file was given)."""
    from pyarrow import fs

    filesystem, place = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), os.path.abspath(path))
    info = filesystem.get_file_info(place)
    if info.type == fs.FileType.Directory:
        inside = filesystem.get_file_info(fs.FileSelector(place))
        if other := [one.base_name for one in inside if one.type == fs.FileType.Directory and is_part(one.base_name)]:
            raise InputError(f"{min(other)} is a folder; expected a Parquet file")
        return filesystem, place, [entry.base_name for entry in inside if entry.type == fs.FileType.File]
    if info.type != fs.FileType.File:
        what = "no such file or directory" if info.type == fs.FileType.NotFound else "a pipe or device"
        raise InputError(f"{what}; record one with moeplan trace record or import")
    folder, name = posixpath.split(place)
    return filesystem, folder, [name]


def _look(filesystem: Any, path: str, form: str) -> _Part:
    import pyarrow.parquet as pq

    with refusing(path):
        state = _state(filesystem, path)  # first: what replaces the file later differs
    with refusing(path), filesystem.open_input_file(path) as stream, pq.ParquetFile(stream) as part:
        meta = parse_meta(part.schema_arrow)
        if meta.form != form:
            raise InputError(f"a trace of form {meta.form}; expected the form {form}; {INSTEAD[form]}")
        names = set(part.schema_arrow.names)
        has_weights = "weight_0" in names
        expected = token_schema(meta, weights=has_weights) if form == "tokens" else count_schema(meta)
        _check_columns(part.schema_arrow, expected)
        width = meta.model.top_k if form == "tokens" else meta.model.num_experts
        _check_sizes(part.metadata, width, stream.size())
        return _Part(meta, Stamp(part.metadata.num_rows, *state), _filled(part), has_weights)


def _state(filesystem: Any, path: str) -> tuple[int, int | None]:
    """The bytes of a file and when it was changed last."""
    info = filesystem.get_file_info(path)
    return info.size or 0, info.mtime_ns


def _check_columns(schema: "pa.Schema", expected: "pa.Schema") -> None:
    for field in expected:
        index = schema.get_field_index(field.name)
        if index < 0:
            raise InputError(f"no column {field.name} (or two of them); expected {field.type}")
        if schema.field(index).type != field.type:
            raise InputError(f"column {field.name} is {schema.field(index).type}; expected {field.type}")


def _check_sizes(metadata: Any, width: int, file_bytes: int) -> None:
    """Refuse a footer whose figures cannot be, before anything is allocated by them; `width` values a row and column.

    Notes
    -----
    Figures of row groups only: to ask pyarrow for those of a damaged column chunk can abort the process.
    """
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    for group in groups:
        if not 0 <= group.num_rows <= MAX_ROW_GROUP_ROWS:
            raise InputError(f"a row group of {group.num_rows:,} rows; expected at most {MAX_ROW_GROUP_ROWS:,}")
        most = metadata.num_columns * (VALUE_BYTES * width * group.num_rows + CHUNK_BYTES)
        if not 0 <= group.total_byte_size <= most:
            raise InputError(
                f"a row group of {group.num_rows:,} rows unpacks to {group.total_byte_size:,} bytes;"
                f" expected at most {most:,} (file of {file_bytes:,} bytes)"
            )
    rows = sum(group.num_rows for group in groups)
    if rows != metadata.num_rows:
        raise InputError(f"row groups of {rows:,} rows in all, its footer says {metadata.num_rows:,}")


def _filled(part: Any) -> frozenset[str]:
    """Nullable columns that are filled in the first rows; that the others are alike is held where they are read."""
    for batch in part.iter_batches(1, columns=list(KEYS)):
        return frozenset(name for name in KEYS if not batch.column(name).null_count)
    return frozenset()


def _difference(first: _Part, other: _Part) -> str:
    if first.meta.model != other.meta.model:
        return f"models {first.meta.model.name!r} and {other.meta.model.name!r} differ; keep one model a directory"
    if first.meta != other.meta:
        return "tokenizer, recorder or step order differ"
    return "one has columns (weights, step, sample or source_rank) that the other lacks"
