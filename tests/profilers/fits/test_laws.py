"""The closed laws: of least relative error, linear where asked, and impossible ones refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from moeplan.errors import InputError
from moeplan.profilers.fits.laws import MIN_SLOPE, AlphaBeta, AttentionLaw

GRID = np.array(list(itertools.product((1, 4, 16), (64, 512, 4096), (256, 1024))), dtype=np.float64).T
POINTS = st.lists(
    st.tuples(st.integers(1, 2**34), st.floats(1e-7, 1e2)), min_size=2, max_size=20, unique_by=lambda point: point[0]
)


def loss(n: np.ndarray, t: np.ndarray, a: float, b: float) -> float:
    return float((((a + b * n) / t - 1) ** 2).sum())


@given(points=POINTS)
def test_no_bounded_solver_finds_a_smaller_relative_error(points: list[tuple[int, float]]) -> None:
    n, t = np.array(points, dtype=np.float64).T
    found = AlphaBeta.of(n, t)
    columns = np.stack([1 / t, n / t], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    oracle = lsq_linear(columns / scale, np.ones(len(t)), bounds=(0, np.inf), tol=1e-12).x / scale
    assert found.a_s >= 0
    assert found.b_s > 0
    assert loss(n, t, found.a_s, found.b_s) <= loss(n, t, *oracle) * (1 + 1e-6) + 1e-6


def test_the_published_constants_come_back_from_their_own_times() -> None:
    works = np.array([2.0**power for power in range(10, 28)])
    found = AlphaBeta.of(works, 2.09e-4 + 3.54e-10 * works)
    assert found.a_s == pytest.approx(2.09e-4, rel=1e-9)
    assert found.b_s == pytest.approx(3.54e-10, rel=1e-9)
    assert found.seconds(works) == pytest.approx(2.09e-4 + 3.54e-10 * works)


def test_times_that_fall_with_size_give_a_flat_line_and_never_a_negative_slope() -> None:
    found = AlphaBeta.of(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))
    assert found.b_s == MIN_SLOPE
    assert found.seconds(np.array([3.0])) == pytest.approx(found.a_s)


def test_the_coefficients_come_back() -> None:
    batch, length, hidden = GRID
    law = AttentionLaw(start_s=2e-5, projection_s=3e-14, score_s=5e-14)
    seconds = [2e-5 + (3e-14 * m + 5e-14 * tokens) * sequences * tokens * m for sequences, tokens, m in GRID.T]
    assert law.seconds(batch, length, hidden) == pytest.approx(seconds)
    found = AttentionLaw.of(batch, length, hidden, t=np.array(seconds))
    assert (found.start_s, found.projection_s, found.score_s) == pytest.approx((2e-5, 3e-14, 5e-14))


def test_no_coefficient_is_negative_where_times_fall() -> None:
    batch, length, hidden = GRID
    found = AttentionLaw.of(batch, length, hidden, t=1 / (batch * length * hidden))
    assert min(found.start_s, found.projection_s, found.score_s) >= 0


@pytest.mark.parametrize("values", [(-1e-9, 1.0), (0.0, 0.0), (np.nan, 1.0), (0.0, np.nan)])
def test_impossible_coefficients_are_refused(values: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="alpha-beta"):
        AlphaBeta(a_s=values[0], b_s=values[1])
    with pytest.raises(InputError, match="attention"):
        AttentionLaw(start_s=values[0], projection_s=values[1], score_s=values[1])
