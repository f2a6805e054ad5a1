"""Alpha-beta fits against scipy's bounded least squares, and their error on sizes they have not seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from moeplan.errors import InputError
from moeplan.profilers.fits.fit import AlphaBeta, HeldOut, alpha_beta, fit

POINTS = st.lists(
    st.tuples(st.integers(1, 2**34), st.floats(1e-7, 1e2)), min_size=2, max_size=20, unique_by=lambda point: point[0]
)


def loss(n: np.ndarray, t: np.ndarray, a: float, b: float) -> float:
    return float((((a + b * n) / t - 1) ** 2).sum())


@given(points=POINTS)
def test_no_bounded_solver_finds_a_smaller_relative_error(points: list[tuple[int, float]]) -> None:
    n, t = np.array(points, dtype=np.float64).T
    found = alpha_beta(n, t)
    columns = np.stack([1 / t, n / t], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    oracle = lsq_linear(columns / scale, np.ones(len(t)), bounds=(0, np.inf), tol=1e-12).x / scale
    assert found.a_s >= 0
    assert found.b_s > 0
    assert loss(n, t, found.a_s, found.b_s) <= loss(n, t, *oracle) * (1 + 1e-6) + 1e-6


@given(
    a_s=st.floats(1e-7, 1e-2),
    b_s=st.floats(1e-12, 1e-8),
    works=st.lists(st.integers(1, 2**30), min_size=3, max_size=12, unique=True),
)
def test_a_line_is_recovered_with_no_error_on_held_out_sizes(a_s: float, b_s: float, works: list[int]) -> None:
    found = fit(works, [a_s + b_s * work for work in works])
    assert found is not None
    assert found.held_out is not None
    assert found.held_out.worst_error < 1e-6
    assert found.seconds(works[0]) == pytest.approx(a_s + b_s * works[0], rel=1e-6)


def test_the_published_constants_come_back_from_their_own_times() -> None:
    works = [2**power for power in range(10, 28)]
    found = fit(works, [2.09e-4 + 3.54e-10 * work for work in works])
    assert found is not None
    assert found.model.a_s == pytest.approx(2.09e-4, rel=1e-9)
    assert found.model.b_s == pytest.approx(3.54e-10, rel=1e-9)


def test_held_out_sizes_do_not_touch_the_fit() -> None:
    works = [100, 200, 400, 800, 1600]
    clean = fit(works, [1 + 0.01 * work for work in works])
    spoilt = fit(works, [2.0, 33.0, 5.0, 7.2, 17.0])  # off by 10 and by 0.2 of 9 at 200 and 800
    assert clean is not None
    assert spoilt is not None
    assert spoilt.model.a_s == pytest.approx(clean.model.a_s)
    assert spoilt.held_out is not None
    assert spoilt.held_out.works == (200, 800)
    assert spoilt.held_out.worst_error == pytest.approx(30 / 33)
    assert spoilt.held_out.median_error == pytest.approx((30 / 33 + 1.8 / 7.2) / 2)


def test_measurements_of_equal_work_are_held_out_together() -> None:
    works = [10, 20, 20, 30, 40, 50]
    found = fit(works, [1.0, 2.0, 8.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert found.held_out is not None
    assert found.held_out.works == (20, 40)
    assert found.held_out.worst_error == pytest.approx(0.75)


def test_the_ends_of_the_range_are_always_fitted() -> None:
    for count in range(3, 9):
        found = fit(range(1, count + 1), [1.0 + work for work in range(1, count + 1)])
        assert found is not None
        assert found.held_out is not None
        assert not {1, count} & set(found.held_out.works)


def test_too_few_sizes_give_no_fit_or_one_without_an_error() -> None:
    assert fit([], []) is None
    assert fit([5, 5], [1.0, 2.0]) is None
    two = fit([5, 6], [1.0, 2.0])
    assert two is not None
    assert two.held_out is None


def test_times_that_fall_with_size_give_a_flat_line_and_never_a_negative_slope() -> None:
    found = alpha_beta(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))
    assert found.b_s > 0
    assert found.seconds(3) == pytest.approx(found.a_s)


@pytest.mark.parametrize(("a_s", "b_s"), [(-1e-9, 1.0), (0.0, 0.0), (float("nan"), 1.0), (0.0, float("nan"))])
def test_impossible_coefficients_are_refused(a_s: float, b_s: float) -> None:
    with pytest.raises(InputError, match="alpha-beta"):
        AlphaBeta(a_s=a_s, b_s=b_s)


def test_impossible_errors_are_refused() -> None:
    with pytest.raises(InputError, match="held-out"):
        HeldOut(works=(1,), median_error=0.2, worst_error=0.1)
