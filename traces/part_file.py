"""Part files: what a directory of them is called, who may add to it, and how one is written whole or not at all."""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MismatchError, StorageError, UsageError
from ..files import atomic_path, size_of
from .schema import KEYS, TraceMeta, parse_meta, refusing

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP_ROWS = 65_536
MEASURED = [*KEYS, "position", "layer"]  # columns worth Parquet statistics


class PartSeries:
    """The parts that one writer adds to a directory: `part-{rank}-{start_ns}-{n}.parquet`.

    Raises
    ------
    MismatchError
        The directory holds a trace of another kind: model, form, tokenizer or recorder differ.
    UsageError
        It already holds parts of this rank, or is no local directory (see `local_directory`).
    StorageError
        It cannot be made.
    """

    def __init__(
        self, directory: str | os.PathLike[str], meta: TraceMeta, *, rank: int = 0, start_ns: int | None = None
    ) -> None:
        self.directory = local_directory(directory)
        self.rank = rank
        self.start_ns = time.time_ns() if start_ns is None else start_ns
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = sorted(filter(is_part, os.listdir(self.directory)))
        except OSError as error:
            raise StorageError(f"{directory}: cannot be a directory of parts ({error.strerror})") from error
        for name in names:
            self._accept(name, meta)

    def write(self, table: "pa.Table", number: int) -> Path:
        """Write a table as part `number`, atomically; again under the same number replaces it.

        Raises StorageError where the disk is full or the directory gone; no unfinished file is left.
        """
        import pyarrow.parquet as pq

        path = self.directory / f"part-{self.rank}-{self.start_ns}-{number}.parquet"
        statistics = [name for name in MEASURED if name in table.column_names]
        repetitive = [name for name in table.column_names if not name.startswith("weight_")]
        leaves = [f"{name}.list.element" if name.startswith("layer_") else name for name in repetitive]
        with atomic_path(path) as temporary:
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                row_group_size=ROW_GROUP_ROWS,
                use_dictionary=leaves,  # gate weights hardly repeat: plain is a fifth faster
                write_statistics=statistics,
                write_page_checksum=True,
            )
        return path

    def _accept(self, name: str, meta: TraceMeta) -> None:
        """Refuse to mix with a part that is already there."""
        import pyarrow.parquet as pq

        path = self.directory / name
        size_of(path, what="a trace")
        with refusing(str(path)), pq.ParquetFile(path) as part:
            held = parse_meta(part.schema_arrow)
        if held != meta:
            raise MismatchError(
                f"{self.directory}: {name} belongs to another trace (model, form, tokenizer or recorder differ);"
                " choose an empty directory"
            )
        if name.startswith(f"part-{self.rank}-"):
            raise UsageError(
                f"{self.directory}: already holds parts of rank {self.rank}, {name} for one; choose an empty directory"
                " or remove it"
            )


def local_directory(path: str | os.PathLike[str]) -> Path:
    """The local directory that a path or a file:// URI names.

    Raises UsageError where it is a URI of another file system: parts are renamed when they are complete, which object
    stores cannot do.
    """
    from urllib.parse import unquote, urlsplit

    text = os.fspath(path)
    if "://" not in text:
        return Path(text)
    scheme, host, place, *_ = urlsplit(text)
    if scheme != "file" or host not in ("", "localhost"):
        raise UsageError(
            f"{text}: traces are read from any file system and written to local ones only; expected a directory or"
            " file:///DIRECTORY, to copy from afterwards"
        )
    return Path(unquote(place))


def is_part(name: str) -> bool:
    """Check whether a file of this name is a finished part of a trace."""
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def is_unfinished(name: str) -> bool:
    """Check whether a file of this name is a part whose writer was killed, or is still at it."""
    return name.startswith(".part-")


def reading_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key by which part 10 follows part 9."""
    return tuple((0, int(piece)) if piece.isdigit() else (1, piece) for piece in re.split(r"([0-9]+)", name))
