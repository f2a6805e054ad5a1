"""Mutual information in bits, beside what the same margins give by chance.

Legend: L tables (layers, or pairs of neighbouring layers); E experts; A rows and B columns of a table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

DRAWS = 6


@dataclass(frozen=True, slots=True)
class Information:
    """Mutual information of L tables against a null of shuffled data."""

    bits: NDArray[np.float64]  #: `[L]`: the plain estimate, which finite data biases upwards
    shuffled: NDArray[np.float64]  #: `[L]`: the mean of the null's draws, biased alike
    spread: NDArray[np.float64]  #: `[L]`: the standard deviation that the null's draws, two or more, show

    @property
    def excess(self) -> NDArray[np.float64]:
        """`[L]`: bits above chance; about 0, give or take two spreads, where there is no dependence."""
        return self.bits - self.shuffled

    @classmethod
    def of(cls, rows: Iterable[tuple[float, Iterable[float]]]) -> Self:
        """Estimates of tables, each with the mean and deviation of its draws."""
        tables = [(bits, np.fromiter(draws, np.float64)) for bits, draws in rows]
        return cls(
            np.array([bits for bits, _ in tables], np.float64),
            np.array([draws.mean() for _, draws in tables], np.float64),
            np.array([draws.std(ddof=1) for _, draws in tables], np.float64),
        )


def affinity_information(transitions: NDArray[np.int64], *, seed: int, draws: int = DRAWS) -> Information:
    """Information in bits that a layer's first choice gives about the first choice in the next, `[L-1]`.

    Parameters
    ----------
    transitions
        `[L-1, E, E]`: tokens from first choice a to first choice b.

    Notes
    -----
    The null shuffles the next layer's first choices among the tokens. That leaves a table's margins as they are and
    makes every pairing equally likely: a random table of fixed margins, drawn without going back to the tokens.
    """
    from scipy.stats import random_table

    rng = np.random.default_rng(seed)
    shuffled = (random_table(W.sum(1), W.sum(0), seed=rng).rvs(size=draws) for W in transitions)
    return Information.of(
        (mutual_information(W), map(mutual_information, null)) for W, null in zip(transitions, shuffled, strict=True)
    )


def mutual_information(table_AB: NDArray[np.int64]) -> float:
    """Bits that the row of a counted pair tells of its column; 0 for an empty table.

    Notes
    -----
    I(A; B) = H(A) + H(B) - H(A, B), with the entropies of the shares that were counted.                (1)
    """
    return entropy(table_AB.sum(1)) + entropy(table_AB.sum(0)) - entropy(table_AB)  # (1)


def entropy(counts: NDArray[np.int64]) -> float:
    """H = log2 N - sum_i n_i log2(n_i) / N in bits, of counts n of any shape that add up to N; 0 for none."""
    filled = counts[counts > 0].astype(np.float64)
    total = filled.sum()
    return float(np.log2(total) - filled @ np.log2(filled) / total) if total else 0.0
