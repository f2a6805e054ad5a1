"""Cohorts of a trace's units as they run on D devices: where and in which step each token is.

Legend: T tokens; U units; B steps; M rows of a tally (blocks of steps, else steps); R rows of counts; D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...solvers.arrays import Ints
from ...traces.model import ModelSpec
from ...traces.schema import TokenBatch
from .steps import Blocks, Lanes, mixed_rows

MOST_CELLS = 2**26  # of pairs by step, layer, expert and source that are read where loads would do


@dataclass(frozen=True, slots=True)
class Located:
    """The tokens of a batch that belong to a cohort: rows of the batch `[T]`, and for each its place.

    `step` is the row of a tally, a step or a block of one, -1 where it does not count; `position` counts in the sample,
    `turn` is sample + position: replicas are taken in turn by it.
    """

    rows: Ints
    unit: Ints
    home: Ints
    step: Ints
    position: Ints
    turn: Ints


@dataclass(frozen=True, slots=True)
class Cohort:
    """Units of a trace as they run on D devices."""

    #: unit_ids, unit_tokens: the units, ascending, and the tokens of each, `[U]`
    unit_ids: Ints
    unit_tokens: Ints
    #: Where each unit starts, `[U]`; None where the trace recorded source ranks, or lanes decide
    home: Ints | None
    #: The step, or block, each unit runs in, `[U]`, -1 in an incomplete last step; None where the trace recorded steps,
    #: or lanes decide
    step: Ints | None
    #: The recorded steps, ascending; None where steps are derived, or `step` holds them
    step_ids: Ints | None = None
    blocks: Blocks | None = None  #: What steps consist of where a tally has a row a block; None: a row a step
    lanes: Lanes | None = None  #: Where concurrent sequences take turns
    num_ranks: int = 0  #: Source ranks that the trace recorded, on which units start; 0: on homes
    #: Devices over which the samples of a step are dealt by their ids, where steps are units; 0: units have homes
    dealt_over: int = 0

    @property
    def ranked(self) -> bool:
        """Check whether units start on the source ranks that the trace recorded."""
        return self.num_ranks > 0

    @property
    def num_rows(self) -> int:
        """Rows of a tally: blocks of steps, else steps."""
        return self.num_steps if self.blocks is None else len(self.blocks.tokens)

    @property
    def step_of_row(self) -> Ints:
        """The step of each row of a tally, `[M]`."""
        return np.arange(self.num_rows) // (1 if self.blocks is None else self.blocks.per_step)

    @property
    def num_steps(self) -> int:
        """Number of complete steps; 1 where no step is complete."""
        if self.blocks is not None:
            return self.blocks.num_steps
        return len(column(self.step_ids)) if self.step is None else int(self.step.max(initial=0)) + 1

    @property
    def scale(self) -> float:
        """A step over what there is of it, in a part that holds less than one."""
        return 1.0 if self.blocks is None else self.blocks.scale

    @property
    def dropped(self) -> int:
        """Units left out of per-step metrics with the incomplete last step."""
        return 0 if self.step is None else int((self.step < 0).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of all units."""
        return int(self.unit_tokens.sum())

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a complete step."""
        if self.blocks is not None:
            return self.blocks.tokens_per_step
        counted_U = slice(None) if self.step is None else self.step >= 0
        return float(self.unit_tokens[counted_U].sum()) / self.num_steps

    def by_step(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Sums over the blocks of each step, `[M, ...]` to `[B, ...]`; whole numbers stay whole."""
        return rows if self.blocks is None else mixed_rows(self.blocks.steps, rows)

    def steps(self) -> list[Ints]:
        """The units of each complete step, by their places in the cohort, where every unit is in one step."""
        step_U = column(self.step)
        order = np.argsort(step_U, kind="stable")
        order = order[np.searchsorted(step_U[order], 0) :]
        return np.split(order, np.flatnonzero(np.diff(step_U[order])) + 1) if len(order) else []

    def steps_by_home(self) -> list[Ints]:
        """Units of each step as `steps` has them, in the order in which ranks gather them: by their home device."""
        assert self.home is not None
        return [at[np.argsort(self.home[at], kind="stable")] for at in self.steps()]

    def locate(self, batch: TokenBatch, unit_T: Ints) -> Located:
        """The batch's tokens that belong to this cohort; `unit_T` is the unit of each of its tokens."""
        ordinal_T = np.minimum(np.searchsorted(self.unit_ids, unit_T), len(self.unit_ids) - 1)
        rows = np.flatnonzero(self.unit_ids[ordinal_T] == unit_T)
        ordinal_T = ordinal_T[rows]
        position_T = batch.position[rows].astype(np.int64)
        if self.lanes is not None:
            step_T, home_T = self.lanes.place(ordinal_T, position_T)
        elif self.step is None:
            step_T = np.searchsorted(column(self.step_ids), column(batch.step)[rows])
        else:
            step_T = self.step[ordinal_T]
        if self.home is not None:
            home_T = self.home[ordinal_T]
        elif self.num_ranks:
            home_T = column(batch.source_rank)[rows].astype(np.int64)
        elif self.dealt_over:
            home_T = column(batch.sample)[rows].astype(np.int64) % self.dealt_over
        sample_T = (unit_T if batch.sample is None else batch.sample)[rows]
        return Located(rows, ordinal_T, home_T.astype(np.int64), step_T, position_T, sample_T + position_T)

    def locate_rows(self, unit_R: Ints) -> tuple[Ints, Ints]:
        """The rows of a table of counts in complete steps of this cohort, and the row of a tally of each."""
        ordinal_R = np.minimum(np.searchsorted(self.unit_ids, unit_R), len(self.unit_ids) - 1)
        step_R = ordinal_R if self.step is None else self.step[ordinal_R]  # recorded steps are the units
        rows = np.flatnonzero((self.unit_ids[ordinal_R] == unit_R) & (step_R >= 0))
        return rows, step_R[rows]


def by_pairs(cohorts: Sequence[Cohort], model: ModelSpec) -> bool:
    """Check whether counts hold the pairs of every recorded step by source: they have the ranks of the cluster.

    They are read one by one where they fit into memory.
    """
    layer = model.num_layers * model.num_experts
    return all(
        cohort.ranked and cohort.step_ids is not None and cohort.num_steps * layer * cohort.num_ranks <= MOST_CELLS
        for cohort in cohorts
    )


def column(values: NDArray[np.integer] | None) -> NDArray[np.integer]:
    """A column that is known to be filled."""
    assert values is not None
    return values
