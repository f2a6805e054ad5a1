"""The source of an import: files that are given, and the recording that an importer opens in them."""

import contextlib
import pickle
import struct
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from ...errors import InputError, MoeplanError
from ...workers import SERIAL, Workers
from ..count_form import CountTable
from ..model import ModelSpec
from ..schema import TokenBatch
from .hidden_layers import spans

T = TypeVar("T")
BLOCK_BYTES = 32 * 2**20  # of tokens or counts at a time
LINES_BYTES = 4 * 2**20  # of lines that a worker parses at a time
DAMAGE: tuple[type[Exception], ...] = (
    ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, ImportError, LookupError, MemoryError,
    OSError, RuntimeError, SyntaxError, TypeError, ValueError, Warning, pickle.PickleError, struct.error,
    tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """The files to import, and the model they are of."""

    files: tuple[Path, ...]  #: All of the kind that the importer recognises, in the order of their names
    model: ModelSpec | None = None  #: What the model's config.json says; None where there is none
    workers: Workers = SERIAL  #: What parses lines

    @property
    def file(self) -> Path:
        """The only file; InputError where there are several, which this kind does not make one recording of."""
        if len(self.files) > 1:
            names = ", ".join(path.name for path in self.files[:3])
            raise InputError(f"{len(self.files)} recordings of one file each ({names}, ...); expected one: import each")
        return self.files[0]


class Source(ABC):
    """A recording whose shape has been checked and whose values have not."""

    #: What the files say of the model, by the names of `ModelSpec`; `layer_ids` always, of tokens `top_k` too
    model: dict[str, Any]
    notes: list[str]  #: What had to be decided or left out, a sentence each; complete once the recording has been read
    has_weights: bool = False

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed: the last expert, or a pass over the files."""
        return int(self.model["num_experts"]) - 1


class TokenSource(Source):
    """A recording of tokens."""

    choice_order: Literal["gate", "unknown"] = "gate"  #: As in `TraceMeta`
    may_be_counts: bool = False  #: Whether it may be counts under another name

    @abstractmethod
    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens in order, a bounded batch at a time; of this phase where the files do not say."""


class CountSource(Source):
    """A recording of counts; `step_order` as in `TraceMeta`."""

    step_order: Literal["known", "unknown"] = "known"

    @abstractmethod
    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts, a bounded table at a time."""


class Importer(Protocol):
    """A module of this folder."""

    def recognises(self, head: bytes) -> bool:
        """Check whether a file that begins so is of this kind."""
        ...

    def open_source(self, given: Given) -> TokenSource | CountSource:
        """The recording in files; InputError where one is damaged or of another layout."""
        ...


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of one of several files or arrays before what is wrong with it."""
    try:
        yield
    except MoeplanError as error:
        raise type(error)(f"{name}: {error}") from error


@contextlib.contextmanager
def refusing_damage(*more: type[Exception]) -> Iterator[None]:
    """Turn whatever a library says of a damaged file into one line; `more` are exceptions of its own."""
    try:
        yield
    except (*DAMAGE, *more) as error:
        reason = " ".join((str(error) or type(error).__name__)[:160].split())
        raise InputError(f"damaged ({reason})") from error


def numbered_lines(path: Path, most_bytes: int, expected: str = "an object a line") -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1; InputError where one is of more than `most_bytes`."""
    with path.open("rb") as stream:
        number = 0
        while text := stream.readline(most_bytes + 1):
            number += 1
            if len(text) > most_bytes:
                raise InputError(f"line {number}: over {most_bytes:,} bytes; expected {expected}")
            if text.strip():
                yield number, text


def parsed_lines(
    parse: Callable[[int, bytes], T | None], path: Path, most_bytes: int, workers: Workers = SERIAL
) -> Iterator[T]:
    """Values that `parse` makes of each line's number and text, in order, None left out; workers parse many at a time.

    InputError of a line, as `parse` and `numbered_lines` raise it, comes after what the lines before it gave.
    """
    for values, error in workers.map(_parsed, _blocks(parse, path, most_bytes)):
        yield from values
        if error is not None:
            raise error


def check_ranks(ranks: Collection[int]) -> None:
    """Refuse a set of ranks with holes: what the missing ones had would be missing from every sum."""
    if missing := sorted(set(range(max(ranks) + 1)) - set(ranks)):
        raise InputError(
            f"ranks {spans(sorted(ranks))} and not {spans(missing)}; expected the files of all ranks together"
        )


def common_steps(steps_of_rank: Mapping[int, Collection[int]], what: str) -> tuple[list[int], list[str]]:
    """The steps that all ranks recorded, ascending, and what is to be said of others; InputError where none is."""
    recorded = [set(steps) for steps in steps_of_rank.values()]
    common = set.intersection(*recorded)
    if not common:
        raise InputError(f"no {what} that all {len(recorded)} ranks recorded; expected the ranks of one recording")
    left_out = len(set.union(*recorded)) - len(common)
    return sorted(common), [f"{left_out:,} {what} left out, which not all ranks recorded"] if left_out else []


def first_of_each(digests: Iterable[tuple[int, bytes]]) -> tuple[list[int], list[str]]:
    """The ranks that recorded tokens of their own, and what is to be said of those that recorded another's.

    `digests` has by rank a hash of everything it recorded. Ranks that share their tokens (tensor parallel attention)
    agree in all of it; each token would be there several times.
    """
    first: dict[bytes, int] = {}
    repeated = [rank for rank, digest in sorted(digests) if first.setdefault(digest, rank) != rank]
    said = f"ranks {spans(repeated)} recorded the very tokens of others (tensor parallel attention): left out"
    return sorted(first.values()), [said] if repeated else []


def _blocks(
    parse: Callable[[int, bytes], T | None], path: Path, most_bytes: int
) -> Iterator[tuple[Callable[[int, bytes], T | None], list[tuple[int, bytes]], InputError | None]]:
    """Arguments of `_parsed`: about `LINES_BYTES` of lines, and what was wrong after them."""
    lines, num_bytes, wrong = list[tuple[int, bytes]](), 0, None
    try:
        for number, text in numbered_lines(path, most_bytes):
            lines.append((number, text))
            num_bytes += len(text)
            if num_bytes >= LINES_BYTES:
                yield parse, lines, None
                lines, num_bytes = [], 0
    except InputError as error:
        wrong = error
    yield parse, lines, wrong


def _parsed(
    parse: Callable[[int, bytes], T | None], lines: list[tuple[int, bytes]], wrong: InputError | None
) -> tuple[list[T], InputError | None]:
    """Parsed lines up to the first that is refused, and why that one is."""
    values = list[T]()
    for number, text in lines:
        try:
            value = parse(number, text)
        except InputError as error:
            return values, error
        if value is not None:
            values.append(value)
    return values, wrong
