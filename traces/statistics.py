"""What a trace holds, in one pass: how much, of what, how skewed, and how much a layer tells of the next.

Legend: L MoE layers; E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .counts import Counter
from .model import NOT_ROUTED
from .reader import Trace
from .schema import PHASES

__all__ = ["Statistics", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Figures of a trace; None where the column is unknown.

    Parameters
    ----------
    phase_tokens
        Tokens of each phase that occurs.
    not_routed, cells
        Choices that were dropped or padded, of all tokens x layers x choices.
    skew
        `[L]`: the load of the busiest expert over the mean, 1 where all are equal.
    affinity
        `[L-1]`: the share of tokens whose next first choice is the likeliest one given the current,

            affinity_l = sum_a max_b W[l, a, b] / sum_ab W[l, a, b]      (1)

        with W the top-1 transitions.
    chance
        `[L-1]`: the same share without knowing the current expert, max_b sum_a W[l, a, b] / sum_ab W[l, a, b]; what
        affinity is above it is what a placement can use.
    """

    num_tokens: int
    num_samples: int | None
    num_steps: int | None
    num_source_ranks: int | None
    phase_tokens: Mapping[str, int]
    not_routed: int
    cells: int
    skew: NDArray[np.float64]
    affinity: NDArray[np.float64]
    chance: NDArray[np.float64]


def describe(trace: Trace) -> Statistics:
    """The figures of a trace; memory grows only with the number of its samples and steps.

    Raises
    ------
    InputError
        The trace is damaged.
    """
    counter = Counter(trace.model)
    seen: dict[str, NDArray[np.int64]] = {name: np.zeros(0, np.int64) for name in sorted(trace.known)}
    phases = np.zeros(len(PHASES), np.int64)
    not_routed = 0
    for batch in trace.batches():
        counter.add(batch)
        phases += np.bincount(batch.phase, minlength=len(PHASES))
        not_routed += int((batch.ids == NOT_ROUTED).sum())
        for name, values in seen.items():
            seen[name] = np.union1d(values, getattr(batch, name))
    counts = counter.counts()
    number = {name: len(values) for name, values in seen.items()}
    W = counts.transitions
    return Statistics(
        num_tokens=counts.num_tokens,
        num_samples=number.get("sample"),
        num_steps=number.get("step"),
        num_source_ranks=number.get("source_rank"),
        phase_tokens={phase: int(tokens) for phase, tokens in zip(PHASES, phases, strict=True) if tokens},
        not_routed=not_routed,
        cells=counts.num_tokens * trace.model.num_layers * trace.model.top_k,
        skew=_share(counts.loads.max(1) * trace.model.num_experts, counts.loads.sum(1)),
        affinity=_share(W.max(2).sum(1), W.sum((1, 2))),  # (1)
        chance=_share(W.sum(1).max(1), W.sum((1, 2))),
    )


def _share(part: NDArray[np.int64 | np.float64], whole: NDArray[np.int64 | np.float64]) -> NDArray[np.float64]:
    """`part / whole`, 0 where nothing was routed."""
    return np.asarray(part / np.maximum(whole, 1), dtype=np.float64)
