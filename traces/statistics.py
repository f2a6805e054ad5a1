"""Statistics of a trace, in one pass: size, columns, skew of loads, and how much a layer tells of the next.

Legend: L MoE layers; E experts; R rows of the count form.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..workers import SERIAL, Workers
from .count_form import CountTable, CountTrace
from .counts import Counter, Counts
from .information import Information, affinity_information
from .loads import Distinct, Packed, batch_loads
from .locality import Locality, SampleLoads, locality
from .reader import Trace
from .schema import PHASES, TokenBatch

# Samples of text were measured at 0.04 to 0.2 (median of layers), random tokens of the same model at 0.002 to 0.008.
ALIKE = 0.02  # locality below which samples choose alike
LONG = 64  # tokens of a sample in the mean, below which its locality says little
UNEVEN = 0.05, 2.0  # Gini of uneven loads: at least, and times what chance gives


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStatistics:
    """Figures that only single tokens give.

    Parameters
    ----------
    affinity
        `[L-1]`: the share of tokens whose next first choice is the likeliest one given the current,

        affinity_l = sum_a max_b W[l, a, b] / sum_ab W[l, a, b]      (1)
    """

    phase_tokens: Mapping[str, int]  #: Tokens of each phase that occurs
    #: not_routed, cells: choices that were dropped or padded, of all tokens x layers x choices
    not_routed: int
    cells: int
    counts: Counts  #: Loads, top-1 transitions W and, if asked for, co-activation
    affinity: NDArray[np.float64]
    #: `[L-1]`: the same share without knowing the current expert, max_b sum_a W[l, a, b] / sum_ab W[l, a, b]; what
    #: affinity is above it is what a placement can use
    chance: NDArray[np.float64]
    #: `[L-1]`: the bits that a first choice tells of the next, beside those of shuffled tokens
    information: Information


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Figures of a trace; None where the column is unknown."""

    num_samples: int | None
    num_steps: int | None
    num_source_ranks: int | None
    loads: NDArray[np.int64]  #: int64 `[L, E]`: tokens that go to an expert
    skew: NDArray[np.float64]  #: `[L]`: the load of the busiest expert over the mean, 1 where all are equal
    gini: NDArray[np.float64]  #: `[L]`: Gini coefficient of the loads, from 0 (all equal) to 1 (all on one expert)
    gini_by_chance: NDArray[np.float64]  #: `[L]`: its expectation if every choice took any expert (2)
    locality: Locality | None  #: How much samples keep to experts of their own
    tokens: TokenStatistics | None  #: What a trace in count form lacks
    seed: int  #: Of the nulls that information and locality stand beside

    @property
    def as_of_random_tokens(self) -> bool:
        """Check whether loads are uneven by more than chance, though long samples choose alike.

        Notes
        -----
        A router that is fed random tokens prefers some experts, but the same ones in every sample. So do samples that
        each mix many documents. Without samples, or with short ones, nothing is known, and the answer is no.
        """
        local = self.locality
        if local is None or self.num_samples is None or local.num_samples < 2:
            return False
        least, times = UNEVEN
        tokens = float(local.num_tokens) / local.num_samples
        uneven = np.median(self.gini) > max(least, times * float(np.median(self.gini_by_chance)))
        return bool(tokens >= LONG and np.median(local.index) < ALIKE and uneven)


def describe(trace: Trace, *, coactivation: bool = False, seed: int = 0, workers: Workers = SERIAL) -> Statistics:
    """The figures of a token trace; memory grows only with the number of its samples and steps.

    Raises
    ------
    InputError
        The trace is damaged.
    UsageError
        The tables of its transitions would pass 4 GiB.
    """
    model, keys = trace.model, _Keys(trace)
    counts, phases = Counter(model, coactivation=coactivation).counts(), np.zeros(len(PHASES), np.int64)
    for _, run in workers.as_completed(_sums_of_run, ((run, coactivation) for run in trace.runs())):
        counts, phases = counts + run.counts, phases + run.phases
        keys.add_run(run)
    W, cells = counts.transitions.astype(np.int64, copy=False), counts.num_tokens * model.num_layers * model.top_k
    tokens = TokenStatistics(
        phase_tokens={phase: int(tokens) for phase, tokens in zip(PHASES, phases, strict=True) if tokens},
        not_routed=cells - int(counts.loads.sum()),
        cells=cells,
        counts=counts,
        affinity=_share(W.max(2).sum(1), W.sum((1, 2))),  # (1)
        chance=_share(W.sum(1).max(1), W.sum((1, 2))),
        information=affinity_information(W, seed=seed),
    )
    return keys.statistics(counts.loads, tokens, seed)


def describe_counts(trace: CountTrace, *, seed: int = 0, workers: Workers = SERIAL) -> Statistics:
    """The figures of a trace in count form; memory and errors as in `describe`."""
    model, keys = trace.meta.model, _Keys(trace)
    loads = np.zeros((model.num_layers, model.num_experts), np.int64)
    for _, run in workers.as_completed(_sums_of_count_run, ((run,) for run in trace.runs())):
        loads += run.loads
        keys.add_run(run)
    return keys.statistics(loads, None, seed)


@dataclass(frozen=True, slots=True)
class _KeySums:
    """Distinct values of key columns in a run of parts, and the loads of the samples that it looked at."""

    values: Mapping[str, NDArray[np.int64]]
    samples: Packed | None


@dataclass(frozen=True, slots=True)
class _TokenSums(_KeySums):
    """Sums of a run of tokens."""

    counts: Counts
    phases: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _CountSums(_KeySums):
    """Sums of a run of counts."""

    loads: NDArray[np.int64]


def _sums_of_run(run: Trace, coactivation: bool) -> _TokenSums:
    counter, keys = Counter(run.model, coactivation=coactivation), _Keys(run)
    phases = np.zeros(len(PHASES), np.int64)
    for batch in run.batches(may_lack=True):
        counter.add(batch)
        phases += np.bincount(batch.phase, minlength=len(PHASES))
        keys.add(batch)
        if keys.samples is not None and batch.sample is not None:
            _add_samples(keys.samples, batch, run.model.num_experts)
    return _TokenSums(*keys.sums(), counter.counts(), phases)


def _sums_of_count_run(run: CountTrace) -> _CountSums:
    model, keys = run.meta.model, _Keys(run)
    loads = np.zeros((model.num_layers, model.num_experts), np.int64)
    for table in run.tables():
        np.add.at(loads, table.layer, table.counts)
        keys.add(table)
        if keys.samples is not None and table.sample is not None:
            keys.samples.add(table.sample, table.layer, table.counts)
    return _CountSums(*keys.sums(), loads)


class _Keys:
    """Distinct values of the columns step, sample and source_rank, and the loads by sample."""

    def __init__(self, trace: Trace | CountTrace) -> None:
        self._model = model = trace.meta.model
        self._values = {name: Distinct() for name in sorted(trace.known)}
        self.samples = SampleLoads(model.num_layers, model.num_experts) if "sample" in trace.known else None

    def add(self, source: TokenBatch | CountTable) -> None:
        """Note the values of the columns that are known."""
        for name, values in self._values.items():
            values.add(getattr(source, name))

    def sums(self) -> tuple[Mapping[str, NDArray[np.int64]], Packed | None]:
        """Distinct values by column, and the loads by sample, as `_KeySums` has them."""
        samples = None if self.samples is None else Packed.of(self.samples.kept())
        return {name: values.values for name, values in self._values.items()}, samples

    def add_run(self, run: _KeySums) -> None:
        """Note what was noted of a run of parts."""
        for name, values in run.values.items():
            if len(values):
                self._values[name].add(values)
        if self.samples is not None and run.samples is not None:
            self.samples.add_loads(run.samples.unpacked())

    def statistics(self, loads: NDArray[np.int64], tokens: TokenStatistics | None, seed: int) -> Statistics:
        """Collect all figures."""
        number = {name: len(values) for name, values in self._values.items()}
        samples = None if self.samples is None else self.samples.kept().counts
        return Statistics(
            num_samples=number.get("sample"),
            num_steps=number.get("step"),
            num_source_ranks=number.get("source_rank"),
            loads=loads,
            skew=_share(loads.max(1) * self._model.num_experts, loads.sum(1)),
            gini=gini(loads),
            gini_by_chance=gini_by_chance(loads),
            locality=None if samples is None else locality(samples, self._model.top_k, seed=seed),
            tokens=tokens,
            seed=seed,
        )


def gini(loads_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gini coefficient of the loads of each layer, `[L]`; 0 where nothing was routed."""
    rising_LE, num_experts = np.sort(loads_LE, axis=1), loads_LE.shape[1]
    ranks_E = 2 * np.arange(1, num_experts + 1) - num_experts - 1
    return _share(rising_LE @ ranks_E, num_experts * loads_LE.sum(1))


def gini_by_chance(loads_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gini coefficient to expect of as many choices that each take any expert, `[L]`.

    Notes
    -----
    Of n choices a load has the mean m = n / E and nearly the normal deviation s = sqrt(m (1 - 1 / E)), for which

        Gini = s / (m sqrt(pi)) = sqrt((E - 1) / (pi n)),     at most 1 - 1 / E                                 (2)
    """
    num_experts = loads_LE.shape[1]
    expected = np.sqrt((num_experts - 1) / (np.pi * np.maximum(loads_LE.sum(1), 1)))
    return np.asarray(np.minimum(expected, 1 - 1 / num_experts))


def _add_samples(samples: SampleLoads, batch: TokenBatch, num_experts: int) -> None:
    """Add the loads of those samples in a batch that are looked at."""
    assert batch.sample is not None
    kept_T = samples.keeps(batch.sample)
    if not kept_T.any():
        return
    kept = batch if kept_T.all() else batch.select(kept_T)
    for part in batch_loads(kept, ("sample",), num_experts, most=samples.most):
        num_layers = part.counts.shape[1]
        layer_R = np.tile(np.arange(num_layers, dtype=np.int32), len(part.keys))
        samples.add(np.repeat(part.keys[:, 0], num_layers), layer_R, part.counts.reshape(-1, num_experts))


def _share(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    """`part / whole`, 0 where nothing was routed."""
    return np.asarray(part / np.maximum(whole, 1), dtype=np.float64)
