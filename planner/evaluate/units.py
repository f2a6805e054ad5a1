"""The units of a trace (samples, else steps, else blocks of rows): what it splits by, and is resampled by.

Legend: U units; I samples (one in two steps counts twice); C cells; L MoE layers; E experts; D devices; R rows of
tokens or counts.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import InputError, UsageError
from ...solvers.arrays import Bools, Ints
from ...traces.count_form import CountTable, CountTrace
from ...traces.counts import count
from ...traces.reader import Trace
from ...traces.schema import TokenBatch
from ...traces.split import Unit, fitted, with_units
from .cells import read_cells, table_units
from .cohort import Cohort, column
from .step_size import StepSize
from .steps import Lanes, check_spans, filled, filled_blocks

MAX_PAIRS = 2**31 - 1  # of a sample in a layer


@dataclass(frozen=True, slots=True)
class UnitIndex:
    """The units of a trace, from one pass over its scalar columns."""

    kind: Unit  #: What the trace splits by, and is resampled by
    #: unit_ids, unit_tokens: int64 `[U]`: the units, ascending, and the tokens of each
    unit_ids: Ints
    unit_tokens: Ints
    steps: Ints | None  #: The recorded steps of each unit, int64 `[C, 2]` rows of (unit, step); None without
    num_source_ranks: int | None  #: One more than the largest recorded source rank; None without
    phases: tuple[str, ...] = ()  #: Those of its tokens, in their order; none of counts
    #: first, span: position of each unit's first token, and positions to its last, `[U]`; None of counts
    first: Ints | None = None
    span: Ints | None = None
    path: str = ""
    dealt: bool = False  #: Whether the samples of a step are dealt over devices: steps are units, and have samples

    @property
    def queries(self) -> float:
        """Mean tokens of a unit in a step: 1 where decoding was recorded step by step."""
        return float(self.unit_tokens.sum() / max(len(self.unit_ids if self.steps is None else self.steps), 1))

    @property
    def split_kind(self) -> Unit:
        """Unit of the held-out split, the same as `kind`."""
        return self.kind

    def fitted(self, *, seed: int, fraction: float, salt: str = "") -> Bools:
        """Mask of the fitted units, `[U]`."""
        return fitted(self.unit_ids, seed=seed, fraction=fraction, salt=salt)

    def cohort(self, chosen_U: Bools, *, num_devices: int, size: StepSize) -> Cohort:
        """The chosen units as they run on `num_devices` devices.

        A unit starts on the source rank recorded where the recording had as many ranks, else on ordinal mod D; steps
        are the recorded ones of these units, else of this size by ascending id. Concurrent sequences need samples, by
        UsageError, with their tokens in a row, by InputError.
        """
        unit_ids, tokens_U = self.unit_ids[chosen_U], self.unit_tokens[chosen_U]
        ranked = num_devices if self.num_source_ranks == num_devices else 0
        home_U = None if ranked else np.arange(len(unit_ids)) % num_devices
        if self.steps is not None:
            step_ids = np.unique(self.steps[np.isin(self.steps[:, 0], unit_ids), 1])
            dealt_over = 0 if ranked or not self.dealt else num_devices
            home_U = None if dealt_over else home_U
            return Cohort(unit_ids, tokens_U, home_U, None, step_ids, num_ranks=ranked, dealt_over=dealt_over)
        if size.unit == "sequences" and len(unit_ids):
            if self.first is None or self.span is None or self.kind != "sample":
                raise UsageError(
                    f"{self.path}: no positions of samples, to run beside others: give --tokens-per-step, as many as"
                    " sequences"
                )
            first_U, span_U = self.first[chosen_U], self.span[chosen_U]
            check_spans(self.path, tokens_U, span_U)
            lanes, density = Lanes.of(first_U, span_U, size.number, num_devices), tokens_U.sum() / span_U.sum()
            return Cohort(unit_ids, tokens_U, None, None, None, lanes.blocks(size.number, density), lanes, ranked)
        sizes_U = tokens_U if size.unit == "tokens" else np.ones_like(tokens_U)
        row_U, blocks = filled_blocks(sizes_U, tokens_U, size.number)
        return Cohort(unit_ids, tokens_U, home_U, row_U, blocks=blocks, num_ranks=ranked)

    def batches(
        self, trace: Trace, phases: Collection[str] | None, *, weights: bool = False
    ) -> Iterator[tuple[TokenBatch, Ints]]:
        """The batches of the trace, with the unit of each token."""
        return with_units(trace.batches(phases=phases, weights=weights), by_step=self.kind == "step")

    def rows(self, table: CountTable) -> Ints:
        """The unit of each row of a table of counts."""
        return table_units(table)


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """The samples of a trace by step, then by id; a unit is a place in this order."""

    #: sample, step, rank: `[I]`; None for steps and source ranks that were not recorded
    sample: Ints
    step: Ints | None
    rank: Ints | None
    #: unit_tokens, contexts: the tokens of each, and the sum over them of 2 x position + 1; whole from the first token
    #: on where only counts are known, `[I]`
    unit_tokens: Ints
    contexts: Ints
    phases: tuple[str, ...] = ()  #: As of `UnitIndex`

    kind: ClassVar[Unit] = "sample"

    @property
    def queries(self) -> float:
        """Mean tokens of a sample in a step: 1 where decoding was recorded step by step."""
        return float(self.unit_tokens.mean())

    @property
    def split_kind(self) -> Unit:
        """Unit of the held-out split: whole recorded steps, or samples where one sample is in several steps."""
        alone = len(np.unique(self.sample)) == len(self.sample)
        return "step" if self.step is not None and alone else "sample"

    @property
    def num_source_ranks(self) -> int | None:
        """Number of source ranks: the largest recorded one + 1; None where none are recorded."""
        return None if self.rank is None else int(self.rank.max()) + 1

    def fitted(self, *, seed: int, fraction: float, salt: str = "", unit: Unit | None = None) -> Bools:
        """Mask of the fitted samples, `[I]`, whole steps where `unit`, else `split_kind`, says so."""
        unit_I = self.step if (unit or self.split_kind) == "step" else self.sample
        ids, place_I = np.unique(column(unit_I), return_inverse=True)
        return np.asarray(fitted(ids, seed=seed, fraction=fraction, salt=salt)[place_I])

    def cohort(self, chosen_U: Bools, *, num_devices: int, size: StepSize) -> Cohort:
        """The chosen samples as they run, whole: on their source ranks, else on ordinal mod D; in their steps, else in
        order, -1 in an incomplete last one.
        """
        place = np.flatnonzero(chosen_U)
        if size.unit == "sequences":
            raise UsageError("--concurrency with a sample policy, which moves whole samples; give --tokens-per-step")
        sizes = self.unit_tokens[place] if size.unit == "tokens" else np.ones_like(place)
        home, step = np.arange(len(place)) % num_devices, filled(sizes, size.number)
        if self.rank is not None and self.num_source_ranks == num_devices:
            home = self.rank[place]
        if self.step is not None:
            step = np.unique(self.step[place], return_inverse=True)[1]
        return Cohort(place, self.unit_tokens[place], home, step)

    def batches(
        self, trace: Trace, phases: Collection[str] | None, *, weights: bool = False
    ) -> Iterator[tuple[TokenBatch, Ints]]:
        """The batches of the trace, with the place of each token's sample."""
        return ((batch, self.rows(batch)) for batch in trace.batches(phases=phases, weights=weights))

    def rows(self, table: TokenBatch | CountTable) -> Ints:
        """The place of each row's sample, `[R]`."""
        assert table.sample is not None
        if self.step is None or table.step is None:
            return np.searchsorted(self.sample, table.sample)
        steps, step_I = np.unique(self.step, return_inverse=True)
        samples, sample_I = np.unique(self.sample, return_inverse=True)
        key_R = np.searchsorted(steps, table.step) * len(samples) + np.searchsorted(samples, table.sample)
        return np.searchsorted(step_I * len(samples) + sample_I, key_R)


def index_units(
    trace: Trace | CountTrace, *, phases: Collection[str] | None = None, by_step: bool = False
) -> UnitIndex:
    """Index the units of a trace in one pass: of tokens samples, else steps, else blocks; of counts steps come first.

    `by_step`: steps come first of tokens, too. A token of counts, which have no phase, counts `top_k` times in the
    layer that counts most.
    """
    by_counts = isinstance(trace, CountTrace)
    ranked = "source_rank" in trace.known and (not by_counts or "step" in trace.known)
    order: tuple[Unit, ...] = ("step", "sample") if by_counts or by_step else ("sample", "step")
    cells = read_cells(trace, phases, by_step=by_step)
    unit_ids, place_C = np.unique(cells.unit, return_inverse=True)
    sums_UX = np.zeros((len(unit_ids), cells.sums.shape[1]), np.int64)
    np.add.at(sums_UX, place_C, cells.sums)
    ends_U2 = np.full((len(unit_ids), 2), np.iinfo(np.int64).max)
    np.minimum.at(ends_U2, place_C, cells.ends)
    first_U, last_U = ends_U2[:, 0], -ends_U2[:, 1]
    return UnitIndex(
        next((kind for kind in order if kind in trace.known), "block"),
        unit_ids,
        -(-sums_UX.max(axis=1) // trace.meta.model.top_k) if by_counts else sums_UX[:, 0],
        np.stack([cells.unit, cells.step], axis=1) if "step" in trace.known and len(unit_ids) else None,
        int(cells.rank.max(initial=-1)) + 1 if ranked else None,
        cells.phases,
        first=None if by_counts else first_U,
        span=None if by_counts else last_U - first_U + 1,
        path=str(trace.path),
        dealt=by_step and not by_counts and {"step", "sample"} <= {*trace.known},
    )


def index_samples(trace: Trace | CountTrace, *, phases: Collection[str] | None = None) -> SampleIndex:
    """Index the samples of a trace in one pass.

    UsageError where samples were not recorded, or phases are asked for of counts; InputError where the trace is empty,
    or a sample is on two ranks in one step.
    """
    if "sample" not in trace.known:
        raise UsageError(f"{trace.path}: samples were not recorded; a sample policy has nothing to move")
    by_counts, cells = isinstance(trace, CountTrace), read_cells(trace, phases, by_sample=True)
    if by_counts and cells.sums.max(initial=0) > MAX_PAIRS:
        raise UsageError(f"{trace.path}: a sample with over {MAX_PAIRS:,} counts in a layer; expected single samples")
    if ((np.diff(cells.step) == 0) & (np.diff(cells.unit) == 0)).any():
        raise InputError(f"{trace.path}: a sample is on two source ranks in one step; expected it whole on one")
    tokens_I = cells.sums.max(axis=1) // trace.meta.model.top_k if by_counts else cells.sums[:, 0]
    if not tokens_I.any():
        raise InputError(f"{trace.path}: no token is routed; there is nothing to move for")
    return SampleIndex(
        sample=cells.unit,
        step=cells.step if "step" in trace.known else None,
        rank=cells.rank if "source_rank" in trace.known else None,
        unit_tokens=tokens_I,
        contexts=tokens_I**2 if by_counts else cells.sums[:, 1],
        phases=cells.phases,
    )


def loads_of(trace: Trace | CountTrace, unit_ids: Ints, *, phases: Collection[str] | None = None) -> Ints:
    """Loads of these units together, incomplete steps included, `[L, E]`."""
    if isinstance(trace, Trace):
        return count(trace, keep=lambda units: np.isin(units, unit_ids), phases=phases).loads
    loads_LE = np.zeros((trace.meta.model.num_layers, trace.meta.model.num_experts), np.int64)
    for table in trace.tables():
        rows = np.isin(table_units(table), unit_ids)
        np.add.at(loads_LE, table.layer[rows], table.counts[rows])
    return loads_LE
