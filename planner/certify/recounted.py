"""A plan's task again, what it reads of its trace counted anew, row by row.

Legend: B steps; L MoE layers; E experts.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...traces.count_form import CountTrace
from ..evaluate.scene import Scene
from ..evaluate.splits import SampleIndex
from ..evaluate.tally import Counter
from ..strategies.placement import mixed_loads
from ..task import Task
from .naive import count_samples, naive_replay

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Recounted(Task):
    """A task whose samples and units are counted naively."""

    bounds: ClassVar[bool] = False  # these are proved again by the strategy's recheck
    tallied = staticmethod(naive_replay)

    untimed: bool = False  #: Whether the profile is not at hand, so that nothing is timed

    @property
    def counter(self) -> Counter | None:
        """The naive count of samples, where they may be re-homed."""
        if not isinstance(self.index, SampleIndex):
            return None
        request = self.request
        return partial(count_samples, self.source, self.index, self.fitted, request.cluster, request.phases)

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
    first, loads_LE = parts[0][1], mixed_loads((weight, part.loads) for weight, part in parts)
    return Fitted(loads_LE, first.steps[:0], first.between, first.within)


def _counted(task: Recounted, followed: int, beside: bool) -> Fitted:
    model, source, cohort = task.model, task.source, task.scene.cohorts[0]
    layers, experts = model.num_layers, model.num_experts
    loads, steps = np.zeros((layers, experts), np.int64), np.zeros((cohort.num_steps, layers, experts), np.int64)
    between, within = (np.zeros((size, experts, experts), np.int64) for size in (layers - 1, layers))
    if isinstance(source, CountTrace):
        for table in source.tables():
            unit_R = task.index.rows(table)
            fitted_R = np.isin(unit_R, cohort.unit_ids)
            np.add.at(loads, table.layer[fitted_R], table.counts[fitted_R])
            rows, step = cohort.locate_rows(unit_R)
            np.add.at(steps, (step, table.layer[rows]), table.counts[rows])
        return Fitted(loads, steps, between, within)
    for batch, unit_T in task.index.batches(source, task.request.phases or None):
        at = cohort.locate(batch, unit_T)
        for layer in range(layers):
            ids_RK = batch.ids[at.rows, layer]
            row, choice = np.nonzero(ids_RK < experts)
            np.add.at(loads[layer], ids_RK[row, choice], 1)
            row, choice = np.nonzero((ids_RK < experts) & (at.step >= 0)[:, None])
            np.add.at(steps[:, layer], (at.step[row], ids_RK[row, choice]), 1)
            for column in ids_RK.T[:followed] if layer else ():
                _add_pairs(between[layer - 1], batch.ids[at.rows, layer - 1, 0], column)
            for one, other in itertools.permutations(ids_RK.T, 2) if beside else ():
                apart = one != other  # an expert named twice is no pair
                _add_pairs(within[layer], one[apart], other[apart])
    return Fitted(loads, steps, between, within)


def _add_pairs(table: Numbers, one: NDArray[np.integer], other: NDArray[np.integer]) -> None:
    """Add the pairs of two choices of every token, both routed, `[E, E]`."""
    routed = (one < len(table)) & (other < len(table))
    np.add.at(table, (one[routed], other[routed]), 1)
