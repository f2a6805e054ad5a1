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

    @property
    def balance(self) -> float:
        """Max/mean load of the devices, as `solvers.flexmoe` has it."""
        return float(self.busiest * self.pairs.shape[1] / max(self.pairs.sum(), 1))


@dataclass(slots=True)
class Loads:
    """Sum of the counts of forwards, each added once its backward pass has begun: others train nothing."""

    pairs: Ints | None = None  #: None: of no forward
    forwards: int = 0
    balances: float = 0.0  #: Sum of their max/mean

    def add(self, counts: Counts, _gradient: Tensor) -> None:
        """Count a forward; a hook of its output."""
        self.pairs = counts.pairs if self.pairs is None else self.pairs + counts.pairs
        self.balances += counts.balance
        self.forwards += 1

    @property
    def balance(self) -> float:
        """Mean max/mean of the forwards."""
        return self.balances / max(self.forwards, 1)

    def clear(self) -> None:
        """Start the next step."""
        self.pairs, self.forwards, self.balances = None, 0, 0.0
