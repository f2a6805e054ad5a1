"""What a fixed capacity drops, counted again: the naive twin of `planner.measures.dropped`.

Legend: B steps; L MoE layers; D devices.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from .pieces import Pass, buffered
from .roster import Roster, Tokens
from .schedule import rows_of

__all__ = ["Buffers"]


class Buffers:
    """How many token-expert pairs want each buffer, and how many rows it has."""

    def __init__(self, plan: Plan, roster: Roster, parts: Iterable[Tokens]) -> None:
        self.wanted: Counter[tuple[int, int, int, int]] = Counter()  # by step, layer, device and expert
        self.plan, held_BD = plan, np.zeros((roster.num_steps, roster.num_devices), np.int64)
        for tokens in parts:
            counted = np.flatnonzero(tokens.step >= 0)
            np.add.at(held_BD, (tokens.step[counted], tokens.home[counted]), 1)
            for layer in range(plan.model.num_layers):
                places = np.stack([tokens.step[counted], tokens.home[counted]], axis=1)
                for ids_T in tokens.ids[counted, layer].T:
                    self._want(places, layer, ids_T)
        self.fullest_B = held_BD.max(axis=1)

    def dropped_share(self, factor: float, pieces: Pass) -> float:
        """Of the pairs, those that find no row, where layers are cut into these pieces."""
        rows_B = rows_of(self.plan.model, factor, self.fullest_B)
        held_LB = [np.sum([buffered(rows_B, chunk) for chunk in layer], axis=0).tolist() for layer in pieces]
        beyond = sum(max(pairs - held_LB[layer][step], 0) for (step, layer, _, _), pairs in self.wanted.items())
        return float(beyond / self.wanted.total())

    def _want(self, places_T2: NDArray[np.int64], layer: int, ids_T: NDArray[np.uint16]) -> None:
        there = ids_T < self.plan.model.num_experts
        wanted, pairs = np.unique(np.column_stack([places_T2, ids_T])[there], axis=0, return_counts=True)
        for (step, device, expert), number in zip(wanted.tolist(), pairs.tolist(), strict=True):
            self.wanted[step, layer, device, expert] += number
