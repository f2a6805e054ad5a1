"""The bound by triples of layers, for whoever has minutes.

Legend: L MoE layers; E experts a layer; D devices (or nodes), S slots of each.
"""

import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from .descent import Descent
from .pairs import KeptBound, kept_bound
from .triples import Triples

__all__ = ["thorough_bound"]

MOST_GROUPS = 5e7  # of a layer's experts; searches through more do not end


def thorough_bound(
    transitions: Iterable[NDArray[np.float64]],
    slots: NDArray[np.int64],
    *,
    kept: float = 0.0,
    time_limit_s: float = 600.0,
    on_progress: Callable[[float], None] | None = None,
) -> KeptBound:
    """The better of `kept_bound` and the bound by triples; the former alone where the latter says nothing.

    That is with unequal slots or replicas, one expert a device, or more groups of experts than can be searched.

    Parameters
    ----------
    transitions, slots
        As for `kept_bound`.
    kept
        What some placement keeps: the closer to the best, the sooner the bound is tight; a guide, no part of the proof.
    time_limit_s
        Seconds after which the best bound so far stands. Where they do not bite, the inputs alone decide the result.
    on_progress
        Called with each better bound.
    """
    deadline = time.perf_counter() + time_limit_s
    weights_LEE = np.array(list(transitions), dtype=np.float64)
    simple = kept_bound(weights_LEE, slots, time_limit_s=time_limit_s)
    size = int(slots.max())
    num_experts = int(slots.sum())
    apart = size == 1 or (slots != size).any() or weights_LEE.shape[1:] != (num_experts, num_experts)
    if apart or math.comb(num_experts, size) > MOST_GROUPS:
        return simple
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        descent = Descent(Triples(weights_LEE, size, executor), simple.value, kept, deadline)
        while not descent.done:
            if descent.step() and descent.best < simple.value and on_progress is not None:
                on_progress(descent.best)
    whole = bool((weights_LEE == np.rint(weights_LEE)).all())
    value = float(np.floor(descent.best)) if whole else descent.best
    kind = "three-layer" if len(weights_LEE) > 1 else "two-layer"
    return KeptBound(value, frozenset({kind})) if value < simple.value else simple
