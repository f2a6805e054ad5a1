"""Pairs dealt out: shares to sources, and an expert's pairs to its devices in turn; compiled.

Legend: E experts; P slots; D devices.
"""

import numpy as np
from numpy.typing import NDArray

from ..arrays import Ints
from ..compiled import compiled
from .holders import FAR, Holders


@compiled
def deal(pairs: Ints, served: Ints, holders: Holders) -> Ints:
    """Pairs by slot and source `[P, D]`: own device first, own node next, then the others in order."""
    num_slots, num_devices = len(served), pairs.shape[1]
    first, device, group = holders.first, holders.device, holders.devices_per_node
    dealt = np.zeros((num_slots, num_devices), np.int64)
    left, room = np.empty(num_devices, np.int64), served.copy()
    for e in range(len(first) - 1):
        if first[e + 1] - first[e] == 1:
            dealt[first[e]] = pairs[e]
            continue
        left[:] = pairs[e]
        for p in range(first[e], first[e + 1]):
            own = min(served[p], left[device[p]])
            dealt[p, device[p]] = own
            left[device[p]] -= own
            room[p] -= own
        for near in (True, False):
            g = 0
            for p in range(first[e], first[e + 1]):
                start = device[p] // group * group if near else g
                end = start + group if near else num_devices
                g = start
                while room[p] > 0 and g < end:
                    some = min(room[p], left[g])
                    dealt[p, g] += some
                    left[g] -= some
                    room[p] -= some
                    if room[p] > 0:
                        g += 1
    return dealt


@compiled
def in_turn(dealt: Ints, holders: Holders) -> tuple[Ints, NDArray[np.int32]]:
    """The devices that the pairs of each expert and source go to, one after the other, and where theirs begin `[E, D]`.

    The devices of an expert take turns, so that any part of a step is split alike: the i-th pair goes to the one that
    is furthest behind its share.
    """
    num_devices = dealt.shape[1]
    first = np.empty((len(holders.first) - 1, num_devices), np.int64)
    device = np.empty(dealt.sum(), np.int32)
    given, at = np.zeros(len(dealt), np.int64), 0
    for e in range(len(holders.first) - 1):
        start, end = holders.first[e], holders.first[e + 1]
        for g in range(num_devices):
            first[e, g], given[start:end] = at, 0
            n, done = dealt[start:end, g].sum(), 0
            for p in range(start, end):
                if dealt[p, g] == n:  # no other has a turn
                    device[at : at + n], done = holders.device[p], n
            at += done
            for i in range(done, n):
                best = furthest_behind(dealt[:, g], given, start, end, n, i + 1)
                given[best] += 1
                device[at] = holders.device[best]
                at += 1
    return first, device


@compiled
def furthest_behind(
    dealt: NDArray[np.integer], given: NDArray[np.integer], start: int, end: int, n: int, i: int
) -> int:
    """The slot, of `start : end`, that the i-th of n pairs goes to, by what each is `dealt` in all and was `given`."""
    best, most = start, -FAR
    for p in range(start, end):
        behind = dealt[p] * i - n * given[p]
        if behind > most:
            best, most = p, behind
    return best
