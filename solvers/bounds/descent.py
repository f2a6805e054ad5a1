"""Polyak's subgradient steps to the prices that make the bound of the triples least.

Bounds take a search; between two of them the steps go by estimates, the more the longer the searches take.
"""

import time

import numpy as np

from .triples import Evaluation, Triples

__all__ = ["Descent"]

TARGET = 0.9  # of the best bound: what the steps head for, unless more is known to be kept
PATIENCE, SHORTER, SHORTEST = 15, 0.7, 0.01  # bounds without progress before steps shorten, and when they are done
PROGRESS = 1e-5  # of the bound; less is none
MOST_ESTIMATES = 50  # between two bounds
ESTIMATE_NODES = 10_000  # of a search, for which an estimate more is due
NODES_PER_S = 1e5  # of each triple's search, until that was measured
LONGEST = 0.2  # of the time that is left, for one bound, until one is better than what was known
FUTILE = 2  # bounds cut short and no better than what was known, after which more are no use


class Descent:
    """The way down from first prices, one `step` at a time; `best` is the least bound so far.

    Its prices, with floors, are its `proof` (`Prices.with_floor`).

    Parameters
    ----------
    known
        A bound that is known already.
    kept
        What some placement keeps.
    deadline
        On the clock of `time.perf_counter`.
    """

    def __init__(self, triples: Triples, known: float, kept: float, deadline: float) -> None:
        self.best, self.proof = float("inf"), np.empty((0, 0, 4))
        self._triples, self._known, self._kept, self._deadline = triples, known, kept, deadline
        self._prices = triples.first_prices()
        self._length, self._stalled, self._futile, self._estimates = 1.0, 0, 0, MOST_ESTIMATES
        self._nodes_per_s = NODES_PER_S

    @property
    def done(self) -> bool:
        """Whether steps got short, the bound is met, time ran out or the layers are too large to search."""
        late = time.perf_counter() >= self._deadline
        return late or self._length < SHORTEST or self.best <= self._kept or self._futile >= FUTILE

    def step(self) -> bool:
        """Evaluate and move; whether that gave a better bound."""
        better, estimated = False, self._estimates > 0
        if estimated:
            self._estimates -= 1
            found = self._triples.evaluate(self._prices, 0)
        else:
            found = self._searched()
            better = self._note(found)
        ahead = found.value - max(self._kept, TARGET * min(self.best, self._known))
        if estimated and ahead <= 0:  # too low an estimate
            self._estimates = 0
        else:
            self._move(found, max(0.0, ahead))
        return better

    def _searched(self) -> Evaluation:
        """A bound, by searches that may take a share of the time that is left."""
        started = time.perf_counter()
        most_s = (LONGEST if self.best >= self._known else 1.0) * max(0.0, self._deadline - started)
        found = self._triples.evaluate(self._prices, 1 + int(most_s * self._nodes_per_s))
        nodes = found.nodes // self._triples.count
        self._estimates = min(MOST_ESTIMATES, nodes // ESTIMATE_NODES)
        if self._estimates:
            self._nodes_per_s = nodes / (time.perf_counter() - started)
        return found

    def _note(self, found: Evaluation) -> bool:
        """Keep the bound if it is better, shorten the steps if bounds no longer are; whether it is."""
        self._stalled = 0 if found.value < self.best * (1 - PROGRESS) else self._stalled + 1
        if self._stalled >= PATIENCE:
            self._length, self._stalled = self._length * SHORTER, 0
        better = found.value < self.best
        if better:
            self.best, self.proof = found.value, self._prices.with_floor(found.floor)
        if not found.searched and self.best >= self._known:
            self._futile += 1
        return better

    def _move(self, found: Evaluation, ahead: float) -> None:
        steepness = found.gradient.dot(found.gradient)
        if steepness == 0.0:
            self._length = 0.0
        else:
            self._prices = self._prices.moved(found.gradient, self._length * ahead / steepness)
