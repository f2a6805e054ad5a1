"""Tally of what passes through an importer: tokens and samples, put in order and counted on the way to disk.

Legend: L MoE layers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ...errors import InputError, UsageError
from ..count_form import CountTable
from ..loads import Distinct
from ..model import NOT_ROUTED
from ..schema import TokenBatch
from .cells import by_weight, repeated

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
        self._first_step = first_step
        self._num_early = self._num_rows = self._num_unrouted = self._num_reordered = self._num_repeated = 0

    def of_tokens(self, batches: Iterable[TokenBatch], *, may_be_counts: bool = False) -> Iterator[TokenBatch]:
        """The batches, each token's choices by descending weight, counted.

        Raises InputError where they may be counts and most cells name an expert twice, as counts would.
        """
        for batch in self._passing(map(self._ordered, batches)):
            self._pairs_L += len(batch) * batch.ids.shape[2]
            self._num_unrouted += int(np.count_nonzero(batch.ids == NOT_ROUTED))
            yield batch
        num_cells = (self._num_rows + self._num_early) * len(self._pairs_L)
        if may_be_counts and 2 * self._num_repeated > num_cells:
            raise InputError(
                f"{self._num_repeated:,} of {num_cells:,} cells name an expert twice; expected expert ids [tokens,"
                " layers, experts per token]: counts are to be named counts"
            )

    def of_counts(self, tables: Iterable[CountTable]) -> Iterator[CountTable]:
        """The tables, counted."""
        for table in self._passing(tables):
            self._pairs_L += np.bincount(table.layer, table.counts.sum(axis=1), len(self._pairs_L))
            yield table

    @property
    def num_tokens(self) -> int | None:
        """Number of tokens; None where not every layer counts the same whole tokens, as far as is known."""
        pairs = float(self._pairs_L[0])
        if self._top_k is None or (self._pairs_L != pairs).any() or pairs % self._top_k:
            return None
        return int(pairs) // self._top_k

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None where samples are unknown."""
        return len(self._samples) or None

    @property
    def notes(self) -> list[str]:
        """Notes on what was odd, rows left out, and choices without an expert."""
        numbers = {
            "cells name an expert twice, which counts twice": self._num_repeated,
            "cells were not in the order of their weights and have been put in it": self._num_reordered,
            f"rows of steps before {self._first_step} left out": self._num_early,
            "choices of no expert: dropped or padding": self._num_unrouted,
        }
        return [f"{number:,} {what}" for what, number in numbers.items() if number]

    def _ordered(self, batch: TokenBatch) -> TokenBatch:
        self._num_repeated += repeated(batch.ids)
        if batch.weights is None:
            return batch
        ids, weights, reordered = by_weight(batch.ids, batch.weights)
        self._num_reordered += reordered
        return replace(batch, ids=ids, weights=weights)

    def _passing(self, parts: Iterable[Rows]) -> Iterator[Rows]:
        """The parts, of which some must have rows, without early ones."""
        for part in parts:
            late = self._late(part)
            self._num_rows += len(late)
            self._num_early += len(part) - len(late)
            if late.sample is not None:
                self._samples.add(late.sample)
            if len(late):
                yield late
        if not self._num_rows:
            raise InputError(f"nothing was recorded{f' since step {self._first_step}' if self._num_early else ''}")

    def _late(self, part: Rows) -> Rows:
        """The rows of a part that are not early."""
        if self._first_step is None:
            return part
        if part.step is None:
            raise UsageError(f"first step {self._first_step} asked for; the recording does not tell steps")
        return part.select(part.step >= self._first_step)
