"""The samples of a trace, step by step: the units that a sample policy moves, and their traffic.

Legend: I samples (one in two steps counts twice); R rows of the trace; T tokens; B steps; L MoE layers; D devices;
E experts; N nodes.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UsageError
from ...profilers.cluster import Cluster
from ...solvers.placement import Placement
from ...traces.count_form import CountTable, CountTrace
from ...traces.reader import Trace
from ...traces.schema import TokenBatch
from ...traces.split import Unit, fitted
from .splits import Cohort, refuse_phases, steps_in_order

__all__ = ["Counter", "SampleIndex", "SampleTraffic", "index_samples"]

MAX_PAIRS = 2**31 - 1  # of a sample in a layer
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleIndex:
    """The samples of a trace by step, then by id; a unit is a place in this order.

    Parameters
    ----------
    sample, step, rank
        `[I]`; None for steps and source ranks that were not recorded.
    unit_tokens, contexts
        The tokens of each, and the sum over them of 2 x position + 1; whole from the first token on where only counts
        are known, `[I]`.
    """

    sample: Numbers
    step: Numbers | None
    rank: Numbers | None
    unit_tokens: Numbers
    contexts: Numbers

    kind: ClassVar[Unit] = "sample"
    by_step: ClassVar[bool] = True

    @property
    def split_kind(self) -> Unit:
        """Unit of the held-out split: whole recorded steps, or samples where one sample is in several steps."""
        alone = len(np.unique(self.sample)) == len(self.sample)
        return "step" if self.step is not None and alone else "sample"

    @property
    def has_steps(self) -> bool:
        """Whether steps were recorded."""
        return self.step is not None

    def recorded_home(self, num_devices: int) -> bool:
        """Whether samples start on their source ranks: the recording had as many."""
        return self.rank is not None and int(self.rank.max()) + 1 == num_devices

    def fitted(self, *, seed: int, fraction: float) -> NDArray[np.bool_]:
        """Whether each sample is fitted, `[I]`, with the whole of its step where `split_kind` says so."""
        unit_I = self.step if self.split_kind == "step" else self.sample
        assert unit_I is not None
        ids, place_I = np.unique(unit_I, return_inverse=True)
        return np.asarray(fitted(ids, seed=seed, fraction=fraction)[place_I.reshape(-1)])

    def cohort(self, chosen_U: NDArray[np.bool_], *, num_devices: int, samples_per_step: int) -> Cohort:
        """The chosen samples as they run: on their source ranks, else on ordinal mod D; in their steps, else in order,
        -1 in an incomplete last one.
        """
        place = np.flatnonzero(chosen_U)
        home = np.arange(len(place)) % num_devices
        if self.rank is not None and self.recorded_home(num_devices):
            home = self.rank[place]
        if self.step is not None:
            steps, step = np.unique(self.step[place], return_inverse=True)
            num_steps, step = len(steps), step.reshape(-1)
        else:
            step, num_steps = steps_in_order(len(place), samples_per_step)
        return Cohort(place, self.unit_tokens[place], home, step, None, num_steps, int((step < 0).sum()))

    def batches(self, trace: Trace, phases: Collection[str] | None) -> Iterator[tuple[TokenBatch, Numbers]]:
        """The batches of the trace, with the place of each token's sample."""
        return ((batch, self.rows(batch)) for batch in trace.batches(phases=phases))

    def rows(self, table: TokenBatch | CountTable) -> Numbers:
        """The place of each row's sample, `[R]`."""
        assert table.sample is not None
        if self.step is None or table.step is None:
            return np.searchsorted(self.sample, table.sample)
        steps, first_B = np.unique(self.step, return_index=True)
        step_R = np.searchsorted(steps, table.step)
        place_R = np.empty(len(table), np.int64)
        for step in np.unique(step_R).tolist():
            end = first_B[step + 1] if step + 1 < len(steps) else len(self.sample)
            here = step_R == step
            place_R[here] = first_B[step] + np.searchsorted(self.sample[first_B[step] : end], table.sample[here])
        return place_R


@dataclass(frozen=True, slots=True, eq=False)
class SampleTraffic:
    """Traffic of every sample under one placement.

    Parameters
    ----------
    placement
        Its replicas, if any, are used evenly.
    copies, nodes
        Copies of each sample to every device, one a token and distinct device, and tokens that visit each node,
        int32 `[I, L, D]` and `[I, L, N]`. Where only counts are known, one a token-expert pair.
    pairs
        Token-expert pairs of each sample on every device, int32 `[I, L, D]`.
    linked
        How often a fitted token goes from an expert of layer l to a device at l + 1, int64 `[L-1, E, D]`; None where
        only counts are known.
    """

    placement: Placement
    copies: NDArray[np.int32]
    nodes: NDArray[np.int32]
    pairs: NDArray[np.int32]
    linked: Numbers | None

    @classmethod
    def empty(cls, placement: Placement, num_samples: int, cluster: Cluster, *, linked: bool) -> Self:
        """Table of zeros for one placement."""
        shape = (num_samples, placement.num_layers)
        by_device = (placement.num_layers - 1, placement.num_experts, cluster.num_devices)
        copies = np.zeros((*shape, cluster.num_devices), np.int32)
        return cls(
            placement,
            copies,
            np.zeros((*shape, cluster.num_nodes), np.int32),
            np.zeros_like(copies) if linked else copies,
            np.zeros(by_device, np.int64) if linked else None,
        )

    def following(self, layer: int, place: Numbers) -> NDArray[np.float64] | None:
        """Copies that the samples at these indices send at the next layer, `[I, D]`. None after the last layer."""
        after = layer + 1
        return self.copies[place, after].astype(np.float64) if after < self.copies.shape[1] else None


# Counts samples: their pairs with experts, `[I, L, E]`, and their traffic under each of several placements.
Counter = Callable[[Sequence[Placement]], tuple[NDArray[np.int32], list[SampleTraffic]]]


def index_samples(trace: Trace | CountTrace, *, phases: Collection[str] | None = None) -> SampleIndex:
    """Index the samples of a trace in one pass.

    Raises
    ------
    UsageError
        Samples were not recorded, or phases are asked for of counts.
    InputError
        The trace is damaged, empty, or has a sample on two ranks in one step.
    """
    if "sample" not in trace.known:
        raise UsageError(f"{trace.path}: samples were not recorded; a sample policy has nothing to move")
    if isinstance(trace, CountTrace):
        refuse_phases(trace, phases)
    sums_of: dict[tuple[int, int, int], Numbers] = {}
    parts = _of_counts(trace) if isinstance(trace, CountTrace) else _of_tokens(trace, phases)
    for keys_U3, sums_UC in parts:
        for key, row in zip(map(tuple, keys_U3.tolist()), sums_UC, strict=True):
            sums_of[key] = sums_of[key] + row if key in sums_of else row
    keys = np.array(sorted(sums_of), np.int64)
    sums = np.array([sums_of[key] for key in map(tuple, keys.tolist())])
    if isinstance(trace, CountTrace) and sums.max() > MAX_PAIRS:
        raise UsageError(f"{trace.path}: a sample with over {MAX_PAIRS:,} counts in a layer; expected single samples")
    if len(np.unique(keys[:, :2], axis=0)) < len(keys):
        raise InputError(f"{trace.path}: a sample is on two source ranks in one step; expected it whole on one")
    tokens_I = sums.max(axis=1) // trace.meta.model.top_k if isinstance(trace, CountTrace) else sums[:, 0]
    if not tokens_I.any():
        raise InputError(f"{trace.path}: no token is routed; there is nothing to move for")
    return SampleIndex(
        sample=keys[:, 1],
        step=keys[:, 0] if "step" in trace.known else None,
        rank=keys[:, 2] if "source_rank" in trace.known else None,
        unit_tokens=tokens_I,
        contexts=tokens_I**2 if isinstance(trace, CountTrace) else sums[:, 1],
    )


def _of_tokens(trace: Trace, phases: Collection[str] | None) -> Iterator[tuple[Numbers, Numbers]]:
    """Samples `[U, 3]` (step, sample, rank) of a batch with their tokens and contexts `[U, 2]`."""
    for batch in trace.batches((), phases=phases):
        keys_U3, place_T = _distinct(batch)
        weight_2T = (np.ones(len(batch)), 2.0 * batch.position + 1)
        sums = [np.bincount(place_T, weight_T, len(keys_U3)).astype(np.int64) for weight_T in weight_2T]
        yield keys_U3, np.stack(sums, axis=1)


def _of_counts(trace: CountTrace) -> Iterator[tuple[Numbers, Numbers]]:
    """Samples `[U, 3]` of a table with their token-expert pairs by layer `[U, L]`."""
    for table in trace.tables():
        keys_U3, place_R = _distinct(table)
        sums_UL = np.zeros((len(keys_U3), trace.meta.model.num_layers), np.int64)
        np.add.at(sums_UL, (place_R, table.layer), table.counts.sum(axis=1))
        yield keys_U3, sums_UL


def _distinct(rows: TokenBatch | CountTable) -> tuple[Numbers, Numbers]:
    nothing = np.zeros(len(rows), np.int64)
    columns = [nothing if column is None else column for column in (rows.step, rows.sample, rows.source_rank)]
    keys_U3, place_R = np.unique(np.stack(columns, axis=1).astype(np.int64), axis=0, return_inverse=True)
    return keys_U3, place_R.reshape(-1)
