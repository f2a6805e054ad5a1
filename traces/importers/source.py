"""What an importer offers: a foreign recording, opened."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..schema import TokenBatch

__all__ = ["Importer", "Source"]


class Source(Protocol):
    """A recording whose shape has been checked and whose values have not.

    Attributes
    ----------
    num_experts
        Routed experts a layer, as the file says; None where it does not.
    notes
        What had to be decided or left out, a sentence each; complete once `batches` has run out.
    """

    num_layers: int
    top_k: int
    num_experts: int | None
    has_weights: bool
    notes: list[str]

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed: a pass over the file."""
        ...

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens in order, a bounded batch at a time."""
        ...


class Importer(Protocol):
    """A module of this folder."""

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins so is of this kind."""
        ...

    def open_source(self, path: Path) -> Source:
        """The recording in a file; InputError where it is damaged or of another layout."""
        ...
