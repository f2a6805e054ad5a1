"""The bound by triples of layers, for whoever has minutes.

Legend: L MoE layers; E experts a layer; D devices (or nodes), S slots of each.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .descent import Descent
from .pairs import KeptBound, kept_bound
from .triples import Triples

__all__ = ["ThoroughBound", "thorough_bound"]

MOST_GROUPS = 5e7  # of a layer's experts; searches through more do not end


@dataclass(frozen=True, slots=True)
class ThoroughBound(KeptBound):
    """A bound, and what proves it.

    Parameters
    ----------
    proof
        Prices and floors `[L, E, E+4]` (`triples.Prices.with_floor`) that give it; None where the simple one stands.
    reason
        Why that is; else empty.
    interrupted
        Whether Ctrl-C ended the descent.
    """

    proof: NDArray[np.float64] | None = field(default=None, compare=False)
    reason: str = ""
    interrupted: bool = False


def thorough_bound(
    transitions: Iterable[NDArray[np.float64]],
    slots: NDArray[np.int64],
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
        What some placement keeps: the closer to the best, the sooner the bound is tight; a guide, no part of the proof.
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
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        triples = Triples(weights_LEE, int(slots[0]), executor)
        descent = Descent(triples, simple.value, kept, deadline + triples.compile())
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


def _beyond(weights_LEE: NDArray[np.float64], slots: NDArray[np.int64]) -> str:
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
