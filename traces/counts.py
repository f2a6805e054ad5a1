"""Counts of a trace for placement, in one pass: loads, transitions, co-activation.

Legend: T tokens; L MoE layers; E experts; K experts per token; U units (samples, steps or blocks of rows).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .model import ModelSpec
from .reader import Trace
from .schema import TokenBatch
from .split import with_units

Pairs = Literal["top1", "first", "all", "weighted"]
Keep = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
MAX_TABLE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over tokens; those of disjoint sets of tokens add up."""

    loads: NDArray[np.int64]  #: int64 `[L, E]`: tokens that go to an expert, over all K choices
    #: `[L-1, E, E]`: tokens that go from expert a of layer l to expert b of layer l+1. int64, or float64 where gate
    #: weights are counted.
    transitions: NDArray[np.int64] | NDArray[np.float64]
    #: int64 `[L, E, E]`, symmetric: tokens that have both a and b, two different choices, in a layer; None if not asked
    #: for
    coactivation: NDArray[np.int64] | None
    num_tokens: int  #: Tokens seen, routed or not

    def __add__(self, other: "Counts") -> "Counts":
        if (self.coactivation is None) != (other.coactivation is None) or self.loads.shape != other.loads.shape:
            raise ValueError(f"counts of shapes {self.loads.shape} and {other.loads.shape}, or with and without pairs")
        both = self.coactivation is not None and other.coactivation is not None
        return Counts(
            self.loads + other.loads,
            self.transitions + other.transitions,
            self.coactivation + other.coactivation if both else None,  # type: ignore[operator]
            self.num_tokens + other.num_tokens,
        )


def count(
    trace: Trace,
    *,
    keep: Keep | None = None,
    pairs: Pairs = "top1",
    coactivation: bool = False,
    phases: Collection[str] | None = None,
) -> Counts:
    """Count a trace in one pass, in memory that does not grow with it.

    Parameters
    ----------
    keep
        From the ids of units `[U]` (see `split.units`) to whether each is counted; None: all.
    pairs
        Which transitions: "top1" between the first choices (the highest gate weight) of both layers; "first" from the
        first choice to all K next ones; "all" between all K x K choices; "weighted" those by the product of the two
        gate weights.
    coactivation
        Count pairs within a layer too.
    phases
        Only tokens of these phases.

    Raises
    ------
    UsageError
        The tables would pass 4 GiB, the trace has no gate weights to weigh by, or no tokens of these phases.
    InputError
        The trace is damaged.

    Notes
    -----
    A choice that is not routed is never counted; a token whose first choice is not routed has no top-1 transition.
    """
    counter = Counter(trace.model, pairs=pairs, coactivation=coactivation)
    for batch, unit_T in with_units(trace.batches(phases=phases, weights=pairs == "weighted")):
        if keep is None:
            counter.add(batch)
            continue
        unit_U, place_T = np.unique(unit_T, return_inverse=True)
        kept_T = keep(unit_U)[place_T]
        counter.add(batch if kept_T.all() else batch.select(kept_T))
    return counter.counts()


class Counter:
    """Tables that batches with all L layers are added to.

    They have one expert more than the model, which stands for not routed and is cut off in the end.
    """

    def __init__(self, model: ModelSpec, *, pairs: Pairs = "top1", coactivation: bool = False) -> None:
        self.pairs = pairs
        self.num_tokens = 0
        self._model = model
        size, layers = model.num_experts + 1, model.num_layers
        table_bytes = (layers - 1 + layers * coactivation) * size * size * 8
        if table_bytes > MAX_TABLE_BYTES:
            raise UsageError(
                f"{layers} layers of {model.num_experts} experts need tables of {table_bytes / 2**30:.1f} GiB;"
                f" expected at most {MAX_TABLE_BYTES // 2**30}"
            )
        kind = np.float64 if pairs == "weighted" else np.int64
        self._loads = np.zeros((layers, size), np.int64)
        self._transitions: NDArray[Any] = np.zeros((layers - 1, size, size), kind)
        self._together = np.zeros((layers, size, size), np.int64) if coactivation else None

    def add(self, batch: TokenBatch) -> None:
        """Count the tokens of a batch."""
        size = self._loads.shape[1]
        before_KT: NDArray[np.intp] | None = None
        for layer in range(self._model.num_layers):
            experts_KT = np.minimum(batch.ids[:, layer].T, size - 1).astype(np.intp, order="C")
            self._loads[layer] += np.bincount(experts_KT.reshape(-1), minlength=size)
            if self._together is not None:
                self._together[layer] += _pairs_within(experts_KT, size)
            if before_KT is not None:
                self._transitions[layer - 1] += self._pairs_between(before_KT, experts_KT, batch, layer)
            before_KT = experts_KT
        self.num_tokens += len(batch)

    def counts(self) -> Counts:
        """Counts so far."""
        routed = slice(self._model.num_experts)
        together = None if self._together is None else self._together[:, routed, routed].copy()
        transitions = self._transitions[:, routed, routed].copy()
        return Counts(self._loads[:, routed].copy(), transitions, together, self.num_tokens)

    def _pairs_between(
        self, before_KT: NDArray[np.intp], after_KT: NDArray[np.intp], batch: TokenBatch, layer: int
    ) -> NDArray[Any]:
        """Transitions into `layer`, `[E+1, E+1]`."""
        size = self._loads.shape[1]
        if self.pairs == "top1":
            return _pairs(before_KT[0], after_KT[0], size)
        gates_KT = None
        if self.pairs == "weighted":
            assert batch.weights is not None
            gates_KT = [batch.weights[:, at].T.astype(np.float64) for at in (layer - 1, layer)]
        table = np.zeros((size, size), self._transitions.dtype)
        for i, before_T in enumerate(before_KT[:1] if self.pairs == "first" else before_KT):
            for j, after_T in enumerate(after_KT):
                table += _pairs(before_T, after_T, size, None if gates_KT is None else gates_KT[0][i] * gates_KT[1][j])
        return table


def _pairs(
    from_T: NDArray[np.intp], to_T: NDArray[np.intp], size: int, gates_T: NDArray[np.float64] | None = None
) -> NDArray[np.int64 | np.float64]:
    """Number of times (a, b) occurs, or the sum of its gates, `[size, size]`."""
    table: NDArray[np.int64 | np.float64] = np.bincount(from_T * size + to_T, gates_T, minlength=size * size)
    return table.reshape(size, size)


def _pairs_within(experts_KT: NDArray[np.intp], size: int) -> NDArray[np.int64]:
    """Number of times a token has both a and b as two different choices, symmetric `[size, size]`."""
    table = np.zeros((size, size), np.int64)
    for i in range(len(experts_KT)):
        for j in range(i):
            table += _pairs(experts_KT[i], experts_KT[j], size).astype(np.int64, copy=False)
    return table + table.T
