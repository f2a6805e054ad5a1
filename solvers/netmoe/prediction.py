"""The next layer's copies of each sample, predicted before its router has run.

A frequency common to all samples adds the same to every sample's cost of a node, and where every place is taken that
changes no choice; what helps is the sample's own.

Legend: I samples; E experts of this layer, F of the next.
"""

import numpy as np
from numpy.typing import ArrayLike

from ..arrays import Floats, checked_counts


def predict_next(counts: ArrayLike, transitions: ArrayLike) -> Floats:
    """The copies of each sample expected at the next layer, `[I, F]`: num(l) A(l -> l+1).

    Parameters
    ----------
    counts
        num(l), `[I, E]`.
    transitions
        Copies going from expert to expert in a fit, `[E, F]`; A is each row over its sum. Experts not met there go on
        like all together.
    """
    counts_IE, weights_EF = _checked(counts, transitions)
    met_E = weights_EF.sum(axis=1, keepdims=True)
    rows_EF = np.divide(weights_EF, met_E, out=np.tile(_frequency(weights_EF), (len(met_E), 1)), where=met_E > 0)
    return np.asarray(counts_IE @ rows_EF)


def global_next(counts: ArrayLike, transitions: ArrayLike) -> Floats:
    """Copies predicted alike for all samples, `[I, F]`: next frequencies in the fit, times a sample's mean copies."""
    counts_IE, weights_EF = _checked(counts, transitions)
    return np.tile(_frequency(weights_EF) * counts_IE.sum() / len(counts_IE), (len(counts_IE), 1))


def sample_transitions(counts: ArrayLike, next_counts: ArrayLike) -> Floats:
    """Transitions `[E, F]` where only the counts of samples are known: those expected if copies kept no memory.

    Notes
    -----
    W[e, f] = sum_i num[i, e] next[i, f] / sum_f next[i, f]: within a sample the next expert is drawn from its counts.
    """
    counts_IE = checked_counts(counts, "counts", (None, np.shape(counts)[-1] if np.ndim(counts) else None))
    next_IF = checked_counts(next_counts, "next_counts", (len(counts_IE), *np.shape(next_counts)[1:2]))
    return np.asarray(counts_IE.T @ (next_IF / np.maximum(next_IF.sum(axis=1, keepdims=True), 1e-300)))


def _checked(counts: ArrayLike, transitions: ArrayLike) -> tuple[Floats, Floats]:
    weights_EF = checked_counts(transitions, "transitions", (None, None))
    return checked_counts(counts, "counts", (None, len(weights_EF))), weights_EF


def _frequency(weights_EF: Floats) -> Floats:
    """The share of each expert of the next layer, `[F]`; all alike without transitions."""
    arrived_F = weights_EF.sum(axis=0)
    total = arrived_F.sum()
    return np.asarray(arrived_F / total) if total > 0 else np.full(len(arrived_F), 1 / len(arrived_F))
