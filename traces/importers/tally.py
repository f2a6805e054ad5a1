"""How much passes through an importer: tokens and samples, counted on the way to disk.

Legend: L MoE layers.
"""

import numpy as np

from ..count_form import CountTable
from ..distinct import Distinct
from ..schema import TokenBatch

__all__ = ["Tally"]


class Tally:
    """Tokens and samples of one recording.

    Parameters
    ----------
    top_k
        Experts a token, by which counts are tokens; None where that is not known.
    """

    def __init__(self, num_layers: int, top_k: int | None) -> None:
        self._pairs_L, self._top_k, self._samples = np.zeros(num_layers), top_k, Distinct()

    def of_tokens(self, batch: TokenBatch) -> TokenBatch:
        """The batch, counted."""
        self._pairs_L += len(batch) * batch.ids.shape[2]
        if batch.sample is not None:
            self._samples.add(batch.sample)
        return batch

    def of_counts(self, table: CountTable) -> CountTable:
        """The table, counted."""
        self._pairs_L += np.bincount(table.layer, table.counts.sum(axis=1), len(self._pairs_L))
        if table.sample is not None:
            self._samples.add(table.sample)
        return table

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
