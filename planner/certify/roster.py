"""Who is in a part of a trace, counted again: the naive twin of `planner.measures.survey`.

Legend: T tokens; L MoE layers; K experts a token; U units; B steps.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from ...traces.schema import TokenBatch

__all__ = ["Roster", "Tokens", "count_rows", "enroll", "tokens_of"]

BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Roster:
    """The units of one part of a trace: the ordinal of each, and how homes and steps follow from it."""

    kind: str
    ordinal_of: dict[int, int]
    num_tokens: int
    num_steps: int
    num_dropped: int
    samples_per_step: int
    num_devices: int
    recorded_home: bool
    step_names: dict[int, int] | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens of a part: ids `[T, L, K]`, unit ordinal, home, step (-1: none), position and turn, each `[T]`."""

    ids: NDArray[np.uint16]
    unit: NDArray[np.int64]
    home: NDArray[np.int64]
    step: NDArray[np.int64]
    position: NDArray[np.int64]
    turn: NDArray[np.int64]


def enroll(
    trace: Trace | CountTrace,
    *,
    seed: int,
    fraction: float,
    fit: bool,
    num_devices: int,
    samples_per_step: int,
    phases: Sequence[str],
) -> Roster:
    """The units of the fitted (or held-out) part, by DESIGN's rules, from the scalar columns."""
    if isinstance(trace, CountTrace):
        return _enroll_counts(trace, f"{seed}:", fraction, samples_per_step, fit=fit, num_devices=num_devices)
    tokens_of: Counter[int] = Counter()
    unit_steps: set[tuple[int, int]] = set()
    highest_rank, kind = -1, "block"
    for batch, unit in _units(trace, (), phases):
        kind = "sample" if batch.sample is not None else "step" if batch.step is not None else "block"
        tokens_of.update(unit.tolist())
        unit_steps.update(() if batch.step is None else zip(unit.tolist(), batch.step.tolist(), strict=True))
        highest_rank = max(highest_rank, *(() if batch.source_rank is None else batch.source_rank.tolist()), -1)
    limit = int(fraction * 2**64)
    wanted = [unit for unit in sorted(tokens_of) if (_hash(f"{seed}:{unit}") < limit) == fit]
    ordinal_of = {unit: ordinal for ordinal, unit in enumerate(wanted)}
    steps = sorted({step for unit, step in unit_steps if unit in ordinal_of})
    whole_steps = max(len(wanted) // samples_per_step, 1)
    return Roster(
        kind=kind,
        ordinal_of=ordinal_of,
        num_tokens=sum(tokens_of[unit] for unit in wanted),
        num_steps=len(steps) or whole_steps,
        num_dropped=0 if steps else max(len(wanted) - whole_steps * samples_per_step, 0),
        samples_per_step=samples_per_step,
        num_devices=num_devices,
        recorded_home=highest_rank + 1 == num_devices,
        step_names={step: index for index, step in enumerate(steps)} if steps else None,
    )


def tokens_of(trace: Trace, roster: Roster, phases: Sequence[str]) -> Iterator[Tokens]:
    """The tokens of a part, batch by batch."""
    for batch, unit in _units(trace, None, phases):
        ordinals = [roster.ordinal_of.get(one, -1) for one in unit.tolist()]
        rows = [row for row, ordinal in enumerate(ordinals) if ordinal >= 0]
        unit_T = np.array(ordinals, dtype=np.int64)[rows]
        home_T = unit_T % roster.num_devices
        if roster.recorded_home and batch.source_rank is not None:
            home_T = batch.source_rank[rows].astype(np.int64)
        step_T = unit_T // roster.samples_per_step
        step_T[step_T >= roster.num_steps] = -1
        if roster.step_names is not None and batch.step is not None:
            step_T = np.array([roster.step_names[one] for one in batch.step[rows].tolist()], dtype=np.int64)
        position_T = batch.position[rows].astype(np.int64)
        yield Tokens(batch.ids[rows], unit_T, home_T, step_T, position_T, unit[rows] + position_T)


def count_rows(trace: CountTrace) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Unit, layer and counts `[E]` of every row: its unit is its step, else its sample, else everything is one."""
    for table in trace.tables():
        keys = table.sample if table.step is None else table.step
        units = [0] * len(table) if keys is None else keys.tolist()
        yield from zip(units, table.layer.tolist(), table.counts, strict=True)


def _enroll_counts(
    trace: CountTrace, salt: str, fraction: float, samples_per_step: int, *, fit: bool, num_devices: int
) -> Roster:
    """The units of counts, a token `top_k` times in the layer that counts most; steps as recorded, else derived."""
    pairs: Counter[tuple[int, int]] = Counter()
    for unit, layer, counts_E in count_rows(trace):
        pairs[unit, layer] += int(counts_E.sum())
    limit, layers, top_k = int(fraction * 2**64), range(trace.meta.model.num_layers), trace.meta.model.top_k
    wanted = [unit for unit in sorted({unit for unit, _ in pairs}) if (_hash(f"{salt}{unit}") < limit) == fit]
    ordinal_of, recorded = {unit: ordinal for ordinal, unit in enumerate(wanted)}, "step" in trace.known
    whole = max(len(wanted) // samples_per_step, 1)
    return Roster(
        kind="step" if recorded else "sample" if "sample" in trace.known else "block",
        ordinal_of=ordinal_of,
        num_tokens=sum(-(-max(pairs[unit, layer] for layer in layers) // top_k) for unit in wanted),
        num_steps=len(wanted) if recorded else whole,
        num_dropped=0 if recorded else max(len(wanted) - whole * samples_per_step, 0),
        samples_per_step=samples_per_step,
        num_devices=num_devices,
        recorded_home=False,
        step_names=ordinal_of if recorded else None,
    )


def _units(
    trace: Trace, layers: tuple[int, ...] | None, phases: Sequence[str]
) -> Iterator[tuple[TokenBatch, NDArray[np.int64]]]:
    """Batches with the unit of each token: its sample, else its step, else its block of rows."""
    row = 0
    for batch in trace.batches(layers, phases=phases or None):
        unit = batch.sample if batch.sample is not None else batch.step
        if unit is None:
            unit = np.arange(row, row + len(batch)) // BLOCK_ROWS
        row += len(batch)
        yield batch, unit.astype(np.int64)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
