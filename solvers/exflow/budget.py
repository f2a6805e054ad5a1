"""Budgets of a search: work, which makes runs repeatable, and time, which caps them; what its steps cost.

Work is in nanoseconds of a core of 2024, the same on every machine.
"""

import math
import time

import numpy as np

from ..moves import naming_group
from .programme import Programme

__all__ = ["PER_STEEP", "WIDEST", "Budget", "block_work", "layer_work", "naming_work", "value_work"]

WIDEST = 4  # experts that a block move deals from each of two devices, at most
BLOCK = 2_000  # a block move
MOVE = 400  # and each of its layers
PER_PLACE = 0.05  # and each of its places, a pair of experts dealt
PER_WAY = 20  # and each way to deal
PER_WAYS = 0.12  # and each pair of ways of neighbouring layers
PER_CHOICE = 9  # and each expert of either device, where not all are dealt
PER_FIELD, PER_OWN = 12, 4  # and each two experts dealt, and each way, where others stay
PER_STEEP = 1.5  # more where the pair is summed by itself (`messages.sum_over`)
STEP = 24_000  # a layer that is assigned or named anew, around the assignment solver
CALL = 6_000  # a call of the assignment solver
PER_CELL, PER_CELL_PLACE = 15, 1 / 40  # and each cell of its matrix, and each cell and place
PER_TRANSITION = 4  # a weight that is added to others


class Budget:
    """Work units that are left and a deadline; the search ends at whichever comes first.

    Parameters
    ----------
    work
        Nanoseconds of a core, by what steps are said to take; of annealing, a thread.
    time_limit_s
        Seconds from now.
    """

    def __init__(self, work: float, time_limit_s: float) -> None:
        self.left = self.total = work
        self._deadline = time.perf_counter() + time_limit_s
        self._capped = False

    def spend(self, work: float) -> None:
        """Take `work` off what is left."""
        self.left -= work

    @property
    def late(self) -> bool:
        """Whether time ran out."""
        return time.perf_counter() >= self._deadline

    @property
    def exhausted(self) -> bool:
        """Whether work or time ran out."""
        return self.left <= 0 or self.late

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._deadline - time.perf_counter())

    @property
    def capped(self) -> bool:
        """Whether time, not work, ended this budget or a part of it."""
        return self._capped or self.late

    def part(self, share: float) -> "Budget":
        """A budget with a share of the work and of the time that is left; `settle` charges what it spends."""
        return Budget(self.left * share, self.remaining_s * share)

    def cap(self) -> None:
        """Note that time ended what others did within this budget."""
        self._capped = True

    def settle(self, part: "Budget") -> None:
        """Charge what a part has spent."""
        self.left -= part.total - part.left
        self._capped |= part.capped


def block_work(programme: Programme) -> float:
    """Work of a block move, mean over devices: up to `WIDEST` experts of each of two dealt anew in every layer."""
    slots, places = programme.slots[programme.slots > 0], len(programme.places)
    return BLOCK + programme.num_layers * float(np.mean([_move_work(size, places) for size in slots.tolist()]))


def layer_work(num_experts: int, num_places: int) -> float:
    """Work of assigning the experts of a layer to places at their best, with their worth there."""
    return STEP + _assignment_work(num_experts, num_places)


def naming_work(programme: Programme) -> float:
    """Work of naming the devices of a layer at their best for the layer before (`best_labels`)."""
    group = naming_group(len(programme.slots), programme.devices_per_node)
    num_nodes = len(programme.slots) // group
    inside, nodes = _assignment_work(group, group), _assignment_work(num_nodes, num_nodes)
    return STEP + num_nodes**2 * inside + nodes + value_work(programme)


def value_work(programme: Programme) -> float:
    """Work of summing what a layer pair keeps under a layout."""
    return PER_TRANSITION * max(programme.sizes) ** 2


def _assignment_work(rows: int, num_places: int) -> float:
    """Work of solving an assignment problem."""
    return CALL + rows * num_places * (PER_CELL + PER_CELL_PLACE * num_places)


def _move_work(slots: int, num_places: int) -> float:
    """Work of dealing anew, in one layer, the experts of two devices of `slots` slots each."""
    m = min(slots, WIDEST)
    ways = math.comb(2 * m, m)
    work = MOVE + PER_PLACE * num_places * m**2 + PER_WAY * ways + PER_WAYS * ways**2
    if slots == m:
        return work
    return work + PER_CHOICE * 2 * slots + PER_FIELD * (2 * m) ** 2 + PER_OWN * ways
