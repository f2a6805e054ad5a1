"""The source of an import: files that are given, and the recording that an importer opens in them."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ...errors import InputError, MoeplanError
from ..count_form import CountTable
from ..model import ModelSpec
from ..schema import TokenBatch

__all__ = ["CountSource", "Given", "Importer", "Source", "naming", "numbered_lines"]


@dataclass(frozen=True, slots=True)
class Given:
    """The files to import, and the model they are of.

    Parameters
    ----------
    files
        All of the kind that the importer recognises, in the order of their names.
    model
        What the model's config.json says; None where there is none.
    """

    files: tuple[Path, ...]
    model: ModelSpec | None = None

    @property
    def file(self) -> Path:
        """The only file; InputError where there are several, which this kind does not make one recording of."""
        if len(self.files) > 1:
            names = ", ".join(path.name for path in self.files[:3])
            raise InputError(f"{len(self.files)} recordings of one file each ({names}, ...); expected one: import each")
        return self.files[0]


class Recording(Protocol):
    """Common part of recordings of tokens and of counts.

    Attributes
    ----------
    model
        What the files say of the model, by the names of `ModelSpec`; `layer_ids` always.
    notes
        What had to be decided or left out, a sentence each; complete once the recording has been read.
    """

    model: Mapping[str, Any]
    notes: list[str]

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed: a pass over the files where it takes one."""
        ...


class Source(Recording, Protocol):
    """A recording of tokens whose shape has been checked and whose values have not; its model has a `top_k`.

    `choice_order` is as in `TraceMeta`.
    """

    has_weights: bool
    choice_order: Literal["gate", "unknown"]

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens in order, a bounded batch at a time; of this phase where the files do not say."""
        ...


@runtime_checkable
class CountSource(Recording, Protocol):
    """A recording of counts; `step_order` as in `TraceMeta`."""

    step_order: Literal["known", "unknown"]

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts, a bounded table at a time."""
        ...


class Importer(Protocol):
    """A module of this folder."""

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins so is of this kind."""
        ...

    def open_source(self, given: Given) -> Source | CountSource:
        """The recording in files; InputError where one is damaged or of another layout."""
        ...


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of one of several files before what is wrong with it."""
    try:
        yield
    except MoeplanError as error:
        raise type(error)(f"{path.name}: {error}") from error


def numbered_lines(path: Path, most_bytes: int, expected: str = "an object a line") -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    Raises
    ------
    InputError
        A line is of more than `most_bytes`, where `expected` was.
    """
    with path.open("rb") as stream:
        number = 0
        while text := stream.readline(most_bytes + 1):
            number += 1
            if len(text) > most_bytes:
                raise InputError(f"line {number}: over {most_bytes:,} bytes; expected {expected}")
            if text.strip():
                yield number, text
