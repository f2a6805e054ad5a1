"""How much passes through an importer: tokens and samples, counted on the way to disk.

Legend: L MoE layers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from ...errors import InputError, UsageError
from ..count_form import CountTable
from ..distinct import Distinct
from ..model import NOT_ROUTED
from ..schema import TokenBatch

__all__ = ["Tally"]

Rows = TypeVar("Rows", TokenBatch, CountTable)


class Tally:
    """Tokens and samples of one recording.

    Parameters
    ----------
    top_k
        Experts a token, by which counts are tokens; None where that is not known.
    first_step
        Rows of earlier steps do not pass; None lets all.
    """

    def __init__(self, num_layers: int, top_k: int | None, first_step: int | None = None) -> None:
        self._pairs_L, self._top_k, self._samples = np.zeros(num_layers), top_k, Distinct()
        self._first_step, self._num_early, self._num_rows, self._num_unrouted = first_step, 0, 0, 0

    def of_tokens(self, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
        """The batches, counted."""
        for batch in self._passing(batches):
            self._pairs_L += len(batch) * batch.ids.shape[2]
            self._num_unrouted += int(np.count_nonzero(batch.ids == NOT_ROUTED))
            yield batch

    def of_counts(self, tables: Iterable[CountTable]) -> Iterator[CountTable]:
        """The tables, counted."""
        for table in self._passing(tables):
            self._pairs_L += np.bincount(table.layer, table.counts.sum(axis=1), len(self._pairs_L))
            yield table

    @property
    def num_tokens(self) -> int | None:
        """None where not every layer counts the same whole tokens, as far as is known."""
        pairs = float(self._pairs_L[0])
        if self._top_k is None or (self._pairs_L != pairs).any() or pairs % self._top_k:
            return None
        return int(pairs) // self._top_k

    @property
    def num_samples(self) -> int | None:
        """None where samples are unknown."""
        return len(self._samples) or None

    @property
    def notes(self) -> list[str]:
        """Notes on rows left out, and on choices without an expert."""
        found = []
        if self._num_early:
            found.append(f"{self._num_early:,} rows of steps before {self._first_step} left out")
        if self._num_unrouted:
            found.append(f"{self._num_unrouted:,} choices of no expert: dropped or padding")
        return found

    def _passing(self, parts: Iterable[Rows]) -> Iterator[Rows]:
        """The parts, of which some must have rows, without early ones."""
        for part in parts:
            late = part if self._first_step is None else self._since(part, self._first_step)
            self._num_rows += len(late)
            self._num_early += len(part) - len(late)
            if late.sample is not None:
                self._samples.add(late.sample)
            if len(late):
                yield late
        if not self._num_rows:
            raise InputError(f"nothing was recorded{f' since step {self._first_step}' if self._num_early else ''}")

    @staticmethod
    def _since(part: Rows, first_step: int) -> Rows:
        if part.step is None:
            raise UsageError(f"first step {first_step} asked for; the recording does not tell steps")
        chosen = part.step >= first_step
        whole = {field.name: getattr(part, field.name) for field in fields(part)}
        rows: dict[str, Any] = {name: None if column is None else column[chosen] for name, column in whole.items()}
        return type(part)(**rows)
