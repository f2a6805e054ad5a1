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
from .splits import Cohort, read_cells, steps_in_order

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
    )
