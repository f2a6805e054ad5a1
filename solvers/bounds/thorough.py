"""The bound by triples of layers, for whoever has minutes: Polyak's subgradient steps to the prices that make it least.

Bounds take a search; between two of them the steps go by estimates, the more the longer the searches take.

Legend: L MoE layers; E experts per layer; D devices (or nodes), S slots of each.
"""

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ...workers import num_threads
from ..arrays import Floats, Ints
from .pairs import KeptBound, kept_bound
from .triples import Evaluation, Triples

TARGET = 0.9  # of the best bound: what the steps head for, unless more is known to be kept
PATIENCE, SHORTER, SHORTEST = 15, 0.7, 0.01  # bounds without progress before steps shorten, and when they are done
PROGRESS = 1e-5  # of the bound; less is none
MOST_ESTIMATES = 50  # between two bounds
ESTIMATE_NODES = 10_000  # of a search, for which an estimate more is due
NODES_PER_S = 1e5  # of each triple's search, until that was measured
LONGEST = 0.2  # of the time that is left, for one bound, until one is better than what was known
FUTILE = 2  # bounds cut short and no better than what was known, after which more are no use
MOST_GROUPS = 5e7  # of a layer's experts; searches through more do not end


@dataclass(frozen=True, slots=True)
class ThoroughBound(KeptBound):
    """A bound, and what proves it."""

    #: Prices and floors `[L, E, E+4]` (`triples.Prices.with_floor`) that give it; None where the simple one stands
    proof: Floats | None = field(default=None, compare=False)
    reason: str = ""  #: Why that is; else empty
    interrupted: bool = False  #: Whether Ctrl-C ended the descent


def thorough_bound(
    transitions: Iterable[Floats],
    slots: Ints,
    *,
    kept: float = 0.0,
    time_limit_s: float = 600.0,
    on_progress: Callable[[float], None] | None = None,
) -> ThoroughBound:
    """The better of `kept_bound` and the bound by triples; the former alone where the latter says nothing.

    That is with unequal slots or replicas, one expert a device, or more groups of experts than can be searched.

    Parameters
    ----------
    transitions, slots
        As for `kept_bound`.
    kept
        Transitions that some placement keeps: the closer to the best, the sooner the bound is tight; only a guide.
    time_limit_s
        Seconds, compilation apart, after which the best bound so far stands, as it does at a KeyboardInterrupt once the
        descent has begun. Where they do not bite, the inputs alone decide the result.
    on_progress
        Called with each better bound.
    """
    deadline = time.perf_counter() + time_limit_s
    weights_LEE = np.array(list(transitions), dtype=np.float64)
    simple = kept_bound(weights_LEE, slots, time_limit_s=time_limit_s)
    if reason := _beyond(weights_LEE, slots):
        return ThoroughBound(simple.value, simple.kinds, reason=reason)
    interrupted = False
    with ThreadPoolExecutor(num_threads()) as executor:
        triples = Triples(weights_LEE, int(slots[0]), executor)
        descent = _Descent(triples, simple.value, kept, deadline + triples.compile())
        try:
            while not descent.done:
                if descent.step() and descent.best < simple.value and on_progress is not None:
                    on_progress(descent.best)
        except KeyboardInterrupt:
            triples.stop()
            interrupted = True
    whole = bool((weights_LEE == np.rint(weights_LEE)).all())
    value = float(np.floor(descent.best)) if whole else descent.best
    if value >= simple.value:
        return ThoroughBound(simple.value, simple.kinds, None, "no tighter in the time it had", interrupted)
    kind = "three-layer" if len(weights_LEE) > 1 else "two-layer"
    return ThoroughBound(value, frozenset({kind}), descent.proof, interrupted=interrupted)


def _beyond(weights_LEE: Floats, slots: Ints) -> str:
    """Why nothing is searched; empty where something is."""
    size, num_experts = int(slots.max()), int(slots.sum())
    if not len(weights_LEE):
        return "no transitions"
    if weights_LEE.shape[1] != num_experts:
        return "slots hold replicas"
    if (slots != size).any():
        return "devices of unequal slots"
    if size == 1:
        return "one expert a device"
    if (groups := math.comb(num_experts, size)) > MOST_GROUPS:
        return f"{groups:.1e} groups of {size} experts, at most {MOST_GROUPS:.0e} can be searched"
    return ""


class _Descent:
    """The way down from first prices, one `step` at a time; `best` is the least bound so far.

    Its prices, with floors, are its `proof` (`Prices.with_floor`).

    Parameters
    ----------
    known
        A bound that is known already.
    kept
        Transitions that some placement keeps.
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
        """Check whether steps got short, the bound is met, time ran out or the layers are too large to search."""
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
