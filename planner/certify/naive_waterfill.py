"""Shared experts by SGLang's waterfill, recounted one token at a time in whole numbers of Python.

Legend: R rows of tokens; K experts per token.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..evaluate.cohort import Cohort, Located
from ..evaluate.journey import Journey
from ..evaluate.scene import Scene

Numbers = NDArray[np.int64]
Place = tuple[int, int, int]  # layer, step, source


class NaiveWaterfill:
    """Devices of the shared experts of a part's tokens under one journey, once all that they send is counted."""

    def __init__(self, scene: Scene, cohort: Cohort, journey: Journey) -> None:
        self.num_devices, self.top_k = scene.cluster.num_devices, scene.model.top_k
        self.at_home = journey.shared_at_home
        self.num_steps, self.scale = cohort.num_steps, cohort.scale
        self.step_M = np.append(cohort.step_of_row, cohort.num_steps)
        self.sent = defaultdict[Place, Counter[int]](Counter)  #: Pairs to every device
        self.tokens, self.placed = Counter[Place](), Counter[Place]()  #: Tokens in all, and so far
        self._ends = dict[Place, list[int]]()

    def count(self, layer: int, device_RK: Numbers, at: Located) -> None:
        """Count where a layer's tokens go."""
        for place, devices in zip(self._places(layer, at), device_RK.tolist(), strict=True):
            self.tokens[place] += 1
            self.sent[place].update(device for device in devices if device >= 0)

    def devices_of(self, layer: int, device_RK: Numbers, at: Located) -> Numbers:
        """The device of each next token's shared expert, `[R]`; -1 where none of its experts is routed."""
        shared_R = np.full(len(device_RK), -1)
        for row, place in enumerate(self._places(layer, at)):
            number = self.placed[place]
            self.placed[place] += 1
            if device_RK[row].max() >= 0:
                shared_R[row] = place[2] if self.at_home else self._drawn(number, place)
        return shared_R

    def _places(self, layer: int, at: Located) -> list[Place]:
        """Layer, step and source of every token."""
        return [(layer, step, here) for step, here in zip(self.step_M[at.step].tolist(), at.home.tolist(), strict=True)]

    def _drawn(self, number: int, place: Place) -> int:
        """The device of a source's shared expert of this number."""
        if place not in self._ends:
            self._ends[place] = [] if self._few(place) else [*accumulate(self._rooms(place))]
        if not (ends := self._ends[place]):
            return place[2]
        if ends[-1] == 0:
            return self._emptiest(place)
        word = (number ^ (place[2] * 0x9E3779B9) % 2**32) * 1664525 + 1013904223
        return bisect_right(ends, word % 2**32 % ends[-1])

    def _few(self, place: Place) -> bool:
        """Check whether a source has too few tokens in a whole step; those of no step are as many as in a mean one."""
        layer, step, here = place
        steps = range(self.num_steps) if step == self.num_steps else [step]
        return sum(self.tokens[layer, one, here] for one in steps) * self.scale / len(steps) < 64

    def _rooms(self, place: Place) -> list[int]:
        """Pairs by which each device is below the level that they and the shared experts have together."""
        sent, here = self.sent[place], place[2]
        level = -(-(sent.total() + sent.total() // self.top_k) // self.num_devices)
        below = [max(level - sent[device], 0) for device in range(self.num_devices)]
        return [room if device == here else room * 10 // 11 for device, room in enumerate(below)]

    def _emptiest(self, place: Place) -> int:
        """The source itself, or a device with 10 % less than the best of those before it."""
        sent, best = self.sent[place], place[2]
        for device in range(self.num_devices):
            if 11 * sent[device] < 10 * sent[best]:
                best = device
        return best
