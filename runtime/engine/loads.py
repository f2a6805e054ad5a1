"""The load of a layer's experts in a step of training, which every rank knows.

Legend: E experts; D devices.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...solvers.arrays import Ints


class Counts(NamedTuple):
    """Token-expert pairs of one forward of a layer."""

    pairs: Ints  #: By expert and source, `[E, D]`
    busiest: int  #: Those of the device that computes most of them


@dataclass(slots=True)
class Loads:
    """Sum of the counts of forwards, each added once its backward pass has begun: others train nothing."""

    forwards: int = 0
    pairs: Ints | None = None  #: None: of no forward
    busiest: int = 0

    def add(self, counts: Counts, _gradient: Tensor) -> None:
        """Count a forward; a hook of its output."""
        self.forwards += 1
        self.pairs = counts.pairs if self.pairs is None else self.pairs + counts.pairs
        self.busiest += counts.busiest

    @property
    def balance(self) -> float:
        """Max/mean load of the devices, the mean over forwards by their pairs; 1 of none."""
        return 1.0 if self.pairs is None else float(self.busiest * self.pairs.shape[1] / max(self.pairs.sum(), 1))

    def clear(self) -> None:
        """Start the next step."""
        self.forwards, self.pairs, self.busiest = 0, None, 0
