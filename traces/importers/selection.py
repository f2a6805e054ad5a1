"""Choice of the importer for a set of files: the first that recognises one of them by its beginning."""

import codecs
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from ...errors import InputError
from ...files import size_of
from ..part_file import reading_order
from .csv_counts import lacking
from .source import Importer

IMPORTERS = {  # engines first: what they write is also a zip archive or JSON
    "megatron": ".megatron",
    "tensorrt_llm": ".tensorrt_llm",
    "sglang": ".sglang",
    "responses": ".responses",
    "numpy": ".numpy_arrays",
    "json_lines": ".json_lines",
    "csv": ".csv_counts",
}
HEAD_BYTES = 2**20  # of a response the routing may come after a long text
MAX_FILES = 16_384
MAX_NAMES = 4  # of files left out that are told


@dataclass(frozen=True, slots=True)
class Chosen:
    """An importer, by its name in `IMPORTERS`, and the files that it reads; what was left out is noted."""

    name: str
    importer: Importer
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def choose(sources: Sequence[Path]) -> Chosen:
    """The importer of these files and of those in these directories, where files of no known kind are left out.

    Raises InputError where no file is of a known kind; or one is not that was named, or whose name but for numbers is
    that of the others, so that something would be missing.
    """
    files = [path for source in sources for path in _files(source)]
    _check_once(files)
    kinds = {path: _kind(_head(path)) for path in files}
    name = next((name for name in IMPORTERS if name in kinds.values()), None)
    if name is None:
        if len(files) == 1 and (reason := lacking(files[0], _head(files[0]))) is not None:
            raise InputError(reason)
        begins = f"begins with {_head(files[0])[:8]!r}, " if len(files) == 1 else f"{len(files):,} files "
        raise InputError(f"{begins}of no kind that can be imported; known: {', '.join(IMPORTERS)}")
    chosen = tuple(path for path in files if kinds[path] == name)
    others = [path for path in files if kinds[path] != name]
    named, series = set(sources), {_series(path) for path in chosen}
    if foreign := next((path for path in others if path in named or _series(path) in series), None):
        raise InputError(f"{foreign.name} is damaged or of another kind than {chosen[0].name}, which is {name}'s")
    return Chosen(name, _importer(name), chosen, _left_out(others))


def _check_once(files: Sequence[Path]) -> None:
    """Refuse a file that is there under two names, or under one twice."""
    seen = set[tuple[int, int]]()
    for path in files:
        identity = path.stat().st_dev, path.stat().st_ino
        if identity in seen:
            raise InputError(f"{path.name} is given twice; it would be counted double")
        seen.add(identity)


def _kind(head: bytes) -> str | None:
    """The first importer that recognises a file that begins so."""
    return next((name for name in IMPORTERS if _importer(name).recognises(head)), None)


def _importer(name: str) -> Importer:
    return cast(Importer, import_module(IMPORTERS[name], __package__))


def _files(source: Path) -> list[Path]:
    """The file itself; of a directory the files in it, but for hidden ones."""
    if not os.path.isdir(source):  # Path.is_dir raises where a name is too long
        size_of(source, what="a recording")
        return [source]
    try:
        names = [name for name in os.listdir(source) if os.path.isfile(source / name) and not name.startswith(".")]
    except OSError as error:
        raise InputError(f"{source}: cannot be read as a recording ({error.strerror})") from error
    if not 0 < len(names) <= MAX_FILES:
        raise InputError(f"{source}: cannot be read as a recording ({len(names):,} files, expected 1 to {MAX_FILES:,})")
    return [source / name for name in sorted(names, key=reading_order)]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from error


def _series(path: Path) -> str:
    """Name of a file with its numbers made equal, common to the files of all ranks."""
    return re.sub("[0-9]+", "0", path.name)


def _left_out(others: list[Path]) -> tuple[str, ...]:
    if not others:
        return ()
    more = ", ..." if len(others) > MAX_NAMES else ""
    return (f"{len(others):,} other files left out: {', '.join(path.name for path in others[:MAX_NAMES])}{more}",)
