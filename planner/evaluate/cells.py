"""The scalar columns of a trace, summed by step, unit and source rank in one pass.

Legend: C cells; L MoE layers; R rows of tokens or counts; T tokens.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ...errors import UsageError
from ...solvers.arrays import Ints
from ...traces.count_form import CountTable, CountTrace
from ...traces.reader import Trace
from ...traces.schema import PHASES, TokenBatch
from ...traces.split import with_units


class Cells(NamedTuple):
    """Tokens by step, unit and source rank, 0 where one was not recorded; `[C]` in ascending order.

    `sums` are tokens and the sum over them of 2 x position + 1, `[C, 2]`; of counts token-expert pairs by layer,
    `[C, L]`. `ends` are the first position and the last, negative, `[C, 2]`. `phases` are those of all tokens, in
    their order; none of counts.
    """

    step: Ints
    unit: Ints
    rank: Ints
    sums: Ints
    ends: Ints
    phases: tuple[str, ...]


def read_cells(
    trace: Trace | CountTrace, phases: Collection[str] | None, *, by_sample: bool = False, by_step: bool = False
) -> Cells:
    """Read the scalar columns of a trace once.

    `by_sample`: units of counts are samples even beside recorded steps; `by_step`: units of tokens are steps even
    beside samples.
    """
    parts, phase_ids = list[tuple[Ints, Ints, Ints]](), set[int]()
    if isinstance(trace, CountTrace):
        if phases:
            raise UsageError(f"{trace.path}: counts of no known phase; leave --phase out")
        for table in trace.tables():
            unit_R = table.sample if by_sample else table_units(table)
            pairs_RL = np.zeros((len(table), trace.meta.model.num_layers), np.int64)
            pairs_RL[np.arange(len(table)), table.layer] = table.counts.sum(axis=1)
            parts.append(_summed(_keys(table, unit_R), pairs_RL, np.zeros((len(table), 2), np.int64)))
    else:
        for batch, unit_T in with_units(trace.batches((), phases=phases), by_step=by_step):
            phase_ids.update(np.unique(batch.phase).tolist())
            position_T = batch.position.astype(np.int64)
            sums_T2 = np.stack([np.ones(len(batch), np.int64), 2 * position_T + 1], axis=1)
            parts.append(_summed(_keys(batch, unit_T), sums_T2, np.stack([position_T, -position_T], axis=1)))
    parts = parts or [(np.zeros((0, 3), np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64))]
    keys_C3, sums, ends = _summed(*map(np.concatenate, zip(*parts, strict=True)))
    step, unit, rank = keys_C3.T
    return Cells(step, unit, rank, sums, ends, tuple(PHASES[phase] for phase in sorted(phase_ids)))


def table_units(table: CountTable) -> Ints:
    """The unit of each row of a table of counts: its step, else its sample, else one block."""
    keys = table.sample if table.step is None else table.step
    return np.zeros(len(table), np.int64) if keys is None else keys.astype(np.int64)


def _keys(rows: TokenBatch | CountTable, unit: Ints | None) -> Ints:
    """Step, unit and source rank of each row, `[R, 3]`."""
    nothing = np.zeros(len(rows), np.int64)
    columns = [nothing if column is None else column for column in (rows.step, unit, rows.source_rank)]
    return np.stack(columns, axis=1).astype(np.int64)


def _summed(keys_R3: Ints, values_RX: Ints, ends_R2: Ints) -> tuple[Ints, Ints, Ints]:
    """The different keys, ascending, the sums of their values and the least of their ends."""
    order = np.lexsort(keys_R3.T[::-1])
    keys_R3 = keys_R3[order]
    first = np.flatnonzero(np.append(True, (keys_R3[1:] != keys_R3[:-1]).any(axis=1))[: len(order)])
    return (
        keys_R3[first],
        np.add.reduceat(values_RX[order], first, axis=0),
        np.minimum.reduceat(ends_R2[order], first, axis=0),
    )
