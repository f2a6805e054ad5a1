"""What an importer offers: a foreign recording, opened."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..count_form import CountTable
from ..schema import TokenBatch

__all__ = ["CountSource", "Importer", "Source"]


class Recording(Protocol):
    """What recordings of tokens and of counts have in common.

    Attributes
    ----------
    model
        What the file says of the model, by the names of `ModelSpec`; `layer_ids` always.
    notes
        What had to be decided or left out, a sentence each; complete once the recording has been read.
    """

    model: Mapping[str, Any]
    notes: list[str]

    def largest_id(self) -> int:
        """The largest expert id, -1 where nothing is routed: a pass over the file where it takes one."""
        ...


class Source(Recording, Protocol):
    """A recording of tokens whose shape has been checked and whose values have not; its model has a `top_k`."""

    has_weights: bool

    def batches(self, phase: str) -> Iterator[TokenBatch]:
        """The tokens in order, a bounded batch at a time; of this phase where the file does not say."""
        ...


@runtime_checkable
class CountSource(Recording, Protocol):
    """A recording of counts."""

    def tables(self, num_experts: int) -> Iterator[CountTable]:
        """The counts, a bounded table at a time."""
        ...


class Importer(Protocol):
    """A module of this folder."""

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins so is of this kind."""
        ...

    def open_source(self, path: Path) -> Source | CountSource:
        """The recording in a file; InputError where it is damaged or of another layout."""
        ...
