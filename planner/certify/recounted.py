"""A plan's task again, what it reads of its trace counted anew, row by row.

Legend: B steps; L MoE layers; E experts.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...traces.count_form import CountTable
from ..evaluate.scene import Scene
from ..evaluate.tally import Counter
from ..task import Task
from .census import Source
from .naive import NaiveReplay

__all__ = ["Fitted", "Recounted", "count_fitted"]

WHOLE = 2**40  # what the loads of a layer of a mixture add up to
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Recounted(Task):
    """A task whose samples and units are counted naively.

    Parameters
    ----------
    untimed
        Whether the profile is not at hand, so that nothing is timed.
    """

    bounds: ClassVar[bool] = False  # these are proved again by the strategy's recheck

    untimed: bool = False

    @cached_property
    def replay(self) -> NaiveReplay:
        """The naive replay of its trace."""
        request = self.request
        return NaiveReplay(request.cluster, request.seed, request.fit_fraction, request.step_samples)

    @property
    def counter(self) -> Counter:
        """The naive count of samples."""
        return partial(self.replay.count_samples, Source(self.source, self.request.phases, by_step=True))

    @cached_property
    def scene(self) -> Scene:
        """Setting of the task, without costs where nothing is timed."""
        return replace(super().scene, costs=None) if self.untimed else super().scene


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """Loads of experts `[L, E]`, and of every complete step `[B, L, E]`; how often an expert follows another
    `[L-1, E, E]` and stands beside another, either first `[L, E, E]`.
    """

    loads: Numbers
    steps: Numbers
    between: Numbers
    within: Numbers


def count_fitted(task: Recounted, *, followed: int, beside: bool) -> Fitted:
    """The counts of a task's fitted units; of a mixture loads alone, each layer's of every trace by its weight.

    Parameters
    ----------
    followed
        How many of a token's choices are counted as followers of its first choice in the layer before.
    beside
        Whether to count the pairs inside layers.
    """
    if not task.request.mixture:
        return _counted(task, followed, beside)
    parts = [(weight, _counted(one, 0, beside=False)) for weight, one in task.members]
    loads_LE = np.zeros_like(parts[0][1].loads)
    for weight, part in parts:
        for layer, row_E in enumerate(part.loads):
            loads_LE[layer] += np.rint(weight * WHOLE * row_E / max(int(row_E.sum()), 1)).astype(np.int64)
    return Fitted(loads_LE, parts[0][1].steps[:0], parts[0][1].between, parts[0][1].within)


def _counted(task: Recounted, followed: int, beside: bool) -> Fitted:
    model = task.model
    census = task.replay.census(Source.of(task.scene))
    roster, layers, experts = census.rosters[0], model.num_layers, model.num_experts
    loads, steps = np.zeros((layers, experts), np.int64), np.zeros((roster.num_steps, layers, experts), np.int64)
    between, within = (np.zeros((size, experts, experts), np.int64) for size in (layers - 1, layers))
    for batch, unit_R, place_R in census.rows():
        rows = roster.rows(batch, unit_R, place_R)
        counts = rows.step >= 0
        if isinstance(batch, CountTable):
            np.add.at(loads, batch.layer[rows.number], batch.counts[rows.number])
            at = rows.number[counts]
            np.add.at(steps, (rows.step[counts], batch.layer[at]), batch.counts[at])
            continue
        for layer in range(layers):
            ids_RK = batch.ids[rows.number, layer]
            row, choice = np.nonzero(ids_RK < experts)
            np.add.at(loads[layer], ids_RK[row, choice], 1)
            row, choice = np.nonzero((ids_RK < experts) & counts[:, None])
            np.add.at(steps[:, layer], (rows.step[row], ids_RK[row, choice]), 1)
            for column in ids_RK.T[:followed] if layer else ():
                _add_pairs(between[layer - 1], batch.ids[rows.number, layer - 1, 0], column)
            for one, other in itertools.permutations(ids_RK.T, 2) if beside else ():
                apart = one != other  # an expert named twice is no pair
                _add_pairs(within[layer], one[apart], other[apart])
    return Fitted(loads, steps, between, within)


def _add_pairs(table: Numbers, one: NDArray[np.integer], other: NDArray[np.integer]) -> None:
    """Add the pairs of two choices of every token, both routed, `[E, E]`."""
    routed = (one < len(table)) & (other < len(table))
    np.add.at(table, (one[routed], other[routed]), 1)
