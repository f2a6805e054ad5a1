"""Unequal chunks: a small first and last one, where the experts saturate.

For r chunks given, a linear programme, a row a longest path that changes stage at chunks i <= j:

    min T   s.t.   sum_{k<=i} (a_a + d x_k) + sum_{i<=k<=j} (a_e + e x_k) + sum_{k>=j} (a_a + d x_k) <= T    (1)
                   2 r a_a + 2 d <= T (half duplex),    sum x = 1,    x >= 0                                 (2)

Its optimum is unchanged when the chunks are reversed, so by convexity some optimal shares read the same both ways: with
one or two chunks, equal ones are best. No shares beat max(2 r a_a + 2 d [half duplex], 2 a_a + r a_e + e), which only
grows with r: unequal chunks help just where the experts saturate, and the search ends, proven, once that bound reaches
the best found; else what it is beyond 16 chunks stays the bound.

Legend: r chunks; x_i the share of the layer in chunk i; d = b_a n_d and e = b_e n_e its seconds without start-up.
"""

import time
from dataclasses import dataclass

import numpy as np

from ..outcome import ROUNDING, Objective, Outcome
from .degree import optimal_degree

MOST = 16  # unequal chunks
Found = tuple[float, tuple[float, ...]]  # seconds and shares


@dataclass(frozen=True, slots=True)
class Chunks:
    """Shares of a layer, one a chunk, in the order they are dispatched."""

    shares: tuple[float, ...]
    equal_s: float  #: Seconds of the best equal chunks; the objective is below it where unequal ones help
    outcome: Outcome


def unequal_chunks(
    *,
    a_a: float,
    b_a: float,
    a_e: float,
    b_e: float,
    n_d: float,
    n_e: float,
    max_degree: int | None = None,
    full_duplex: bool = False,
) -> Chunks:
    """The best chunks of one pass, up to 16 of any shares or any number of equal ones; equal where none are faster.

    Parameters
    ----------
    a_a, b_a, a_e, b_e, n_d, n_e
        As for `optimal_degree`; for a backward pass with a_e and b_e times its factor.
    max_degree
        The most chunks; None for no limit.

    Raises
    ------
    ValueError
        As `optimal_degree`.
    """
    started = time.perf_counter()
    equal = optimal_degree(
        a_a=a_a, b_a=b_a, a_e=a_e, b_e=b_e, n_d=n_d, n_e=n_e, backward=0, max_degree=max_degree, full_duplex=full_duplex
    )
    d, e = b_a * n_d, b_e * n_e
    most = min(max_degree or MOST, MOST)
    least_s = [max(0.0 if full_duplex else 2 * r * a_a + 2 * d, 2 * a_a + r * a_e + e) for r in range(most + 2)]
    best_s, shares = _searched((equal.forward_s, (1 / equal.forward,) * equal.forward), (a_a, a_e, d, e), least_s)
    outcome = Outcome.of(
        objective=Objective("pass_s", best_s, "min"),
        bound=min(least_s[-1], best_s),
        bound_kind="saturation",
        proven=most == max_degree or least_s[-1] >= best_s * (1 - ROUNDING),
        started=started,
        backend="scipy highs",
    )
    return Chunks(shares, equal.forward_s, outcome)


def _searched(best: Found, stages: tuple[float, float, float, float], least_s: list[float]) -> Found:
    """The best of equal chunks and of the programmes' of three and more; `least_s` bounds each, up to one more."""
    for r in range(3, len(least_s) - 1):
        best_s = best[0]
        if least_s[r] >= best_s * (1 - ROUNDING):
            break
        a_a, a_e, d, e = (seconds / best_s for seconds in stages)
        found_s, shares = _programme(r, a_a, a_e, d, e, least_s[r] / best_s)
        if found_s < 1 - ROUNDING:
            best = found_s * best_s, shares
    return best


def _programme(r: int, a_a: float, a_e: float, d: float, e: float, least: float) -> Found:
    """T and the shares of `r` chunks."""
    from scipy.optimize import linprog

    i, j = np.triu_indices(r)
    chunk = np.arange(r)
    through = (i[:, None] <= chunk) & (chunk <= j[:, None])
    rows = d * ((chunk <= i[:, None]).astype(float) + (chunk >= j[:, None])) + e * through
    start = a_a * (i + 1 + r - j) + a_e * (j - i + 1)
    found = linprog(
        np.append(np.zeros(r), 1.0),
        A_ub=np.column_stack([rows, np.full(len(i), -1.0)]),  # (1)
        b_ub=-start,
        A_eq=[[1.0] * r + [0.0]],
        b_eq=[1.0],
        bounds=[(0, 1)] * r + [(least, None)],  # (2)
    )
    assert found.status == 0, found.message
    return float(found.fun), tuple(found.x[:r].tolist())
