"""The models of seconds: closed laws, monotone curves, and the surface in many axes."""

import base64
import itertools
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RBFInterpolator
from scipy.optimize import lsq_linear

from moeplan.errors import InputError
from moeplan.profilers.fits.laws import MIN_SLOPE, AlphaBeta, AttentionLaw
from moeplan.profilers.fits.piecewise import Piecewise
from moeplan.profilers.fits.surface import Surface

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


Kind = Literal["piecewise", "piecewise_linear"]
KINDS = pytest.mark.parametrize("kind", ["piecewise", "piecewise_linear"])
CURVES = st.lists(st.tuples(st.integers(1, 2**40), st.floats(1e-7, 1e2)), min_size=2, max_size=20).filter(
    lambda points: len({n for n, _ in points}) > 1
)


@KINDS
@given(points=CURVES, asked=st.lists(st.floats(1, 2**42), min_size=2, max_size=20))
def test_no_size_takes_less_than_a_smaller_one(kind: Kind, points: list[tuple[int, float]], asked: list[float]) -> None:
    n, t = np.array(points, dtype=np.float64).T
    model = Piecewise.of(n, t, kind)
    found = model.seconds(np.sort(np.array(asked + n.tolist())))
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-9 * found[1:]).all()


@settings(max_examples=40)
@given(values=st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_knots_are_the_never_falling_values_of_least_absolute_distance(values: list[int]) -> None:
    n, t = np.arange(1.0, len(values) + 1), np.array(values, dtype=np.float64)
    model = Piecewise.of(n, t)
    rising = itertools.combinations_with_replacement(range(1, 6), len(values))
    best = min(sum(abs(one - value) for one, value in zip(row, values, strict=True)) for row in rising)
    assert np.abs(np.array(model.seconds_at) - t).sum() == pytest.approx(best)


def test_one_kind_is_straight_in_the_logs_and_the_other_in_the_numbers() -> None:
    n, t = np.array([1.0, 4.0, 16.0]), np.array([1.0, 8.0, 64.0])
    asked = np.array([2.0, 8.0])
    assert Piecewise.of(n, t, "piecewise").seconds(asked) == pytest.approx(asked**1.5)
    assert Piecewise.of(n, t, "piecewise_linear").seconds(asked) == pytest.approx([1 + 7 / 3, 8 + 56 / 3])


@KINDS
def test_it_is_constant_below_and_keeps_the_last_slope_beyond(kind: Kind) -> None:
    n = np.array([10.0, 100.0, 1000.0])
    model = Piecewise.of(n, n * 1e-6, kind)
    assert model.seconds(np.array([0.0, 1.0, 10.0])) == pytest.approx(1e-5)
    assert model.seconds(np.array([1e5])) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("works", "seconds"),
    [
        ((1.0,), (1.0,)),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((1.0, 2.0), (1.0,)),
        ((0.0, 1.0), (1.0, 1.0)),
    ],
)
def test_impossible_knots_are_refused(works: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="piecewise"):
        Piecewise(works=works, seconds_at=seconds)


def test_a_steep_last_step_is_continued_in_proportion_to_work() -> None:
    model = Piecewise.of(np.array([88.0, 89.0]), np.array([1.0, 88.0]))
    assert model.seconds(np.array([8900.0])) == pytest.approx(8800)


SITES = list(itertools.product((64, 128, 512, 1024, 4096), (32, 256, 2048, 7168)))
KNOTS = (1, 16, 64, 256, 1024)


def law(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(np.maximum(m * n * k / 1e14, n * k / 1e12), 3e-6))


def points() -> np.ndarray:
    return np.array([(m, n, k) for n, k in SITES for m in KNOTS], dtype=np.float64)


def made() -> Surface:
    return Surface.of(("m", "n", "k"), points(), law(*points().T))


def test_measured_points_come_back() -> None:
    assert made().seconds(*points().T) == pytest.approx(law(*points().T), rel=1e-5)


def test_between_sites_it_is_kriging_with_a_linear_variogram_on_a_plane() -> None:
    asked = np.random.default_rng(0).integers(20, 9000, (50, 2)).astype(float)
    for m in KNOTS:
        times = law(float(m), *np.array(SITES, dtype=float).T)  # type: ignore[arg-type]
        oracle = RBFInterpolator(np.log1p(SITES), np.log(times), kernel="linear", degree=1)
        found = made().seconds(np.full(50, float(m)), *asked.T)
        assert np.log(found) == pytest.approx(oracle(np.log1p(asked)), abs=1e-4)


def test_along_the_curve_it_is_straight_in_the_logs_and_keeps_the_last_octaves_slope() -> None:
    site = (np.full(3, 4096.0), np.full(3, 7168.0))
    low, middle, high = np.log(
        made().seconds(np.log1p([0, 0, 0]) + np.array([64.0, np.sqrt(65 * 257) - 1, 256.0]), *site)
    )
    assert middle == pytest.approx((low + high) / 2)
    beyond = made().seconds(np.array([1024.0, 4099.0, 0.0]), *site)
    assert beyond[1] / beyond[0] == pytest.approx(4, rel=0.02)
    assert beyond[2] == pytest.approx(law(*np.array([1.0, 4096.0, 7168.0])), rel=1e-5)


def test_scalars_and_arrays_broadcast_and_many_distinct_sites_agree_with_each_alone() -> None:
    surface = made()
    rng = np.random.default_rng(1)
    m, n, k = rng.integers(1, 9000, (3, 5000)).astype(float)
    together = surface.seconds(m, n, k)
    alone = [float(surface.seconds(*at)) for at in np.stack([m, n, k], axis=1)[::500]]
    assert together[::500] == pytest.approx(alone)
    assert surface.seconds(np.array([]), np.array([]), np.array([])).shape == (0,)
    assert surface.seconds(np.array([[1.0], [2.0]]), np.array(64.0), np.array([32.0, 64.0, 128.0])).shape == (2, 3)


def test_sites_with_curves_of_their_own_sizes_are_read_at_common_knots() -> None:
    rows = np.array([(1, 64), (100, 64), (10, 128), (1000, 128)], dtype=float)
    surface = Surface.of(("tokens", "hidden"), rows, rows[:, 0] + 1)
    assert surface.knots == (1, 10, 100, 1000)
    assert surface.seconds(*rows.T) == pytest.approx(rows[:, 0] + 1, rel=1e-5)


def test_a_site_measured_at_one_size_takes_the_slopes_of_its_neighbours_through_it() -> None:
    every = points()
    seen = every[(every[:, 1] < 4096) | (every[:, 0] == 1)]
    surface = Surface.of(("m", "n", "k"), seen, law(*seen.T))
    assert surface.seconds(*seen.T) == pytest.approx(law(*seen.T), rel=1e-5)
    for n in (2500.0, 4096.0):
        asked = np.full(4, 1024.0), np.full(4, n), np.array([32.0, 256.0, 2048.0, 7168.0])
        assert (np.abs(np.log(surface.seconds(*asked) / law(*asked))) < np.log(4)).all()


def test_more_values_than_knots_are_thinned_and_still_near() -> None:
    m = np.arange(1.0, 401)
    rows = np.array([(at, n) for at in m for n in (8, 16)], dtype=float)
    surface = Surface.of(("m", "n"), rows, rows.prod(axis=1) * 1e-9)
    assert len(surface.knots) <= 96
    assert surface.seconds(*rows.T) == pytest.approx(rows.prod(axis=1) * 1e-9, rel=0.01)


def test_sites_on_a_line_do_without_slopes_across_it() -> None:
    rows = np.array([(m, n, n) for m in (1, 2, 4) for n in (8, 16, 64)], dtype=float)
    surface = Surface.of(("m", "n", "k"), rows, rows.prod(axis=1) * 1e-9)
    assert surface.seconds(*rows.T) == pytest.approx(rows.prod(axis=1) * 1e-9, rel=1e-5)
    assert np.isfinite(surface.seconds(np.array([3.0]), np.array([8.0]), np.array([64.0]))).all()


def encoded(values: list[float]) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode()


@pytest.mark.parametrize(
    "spoilt",
    [
        {"knots": (1,)},
        {"knots": (2, 1)},
        {"knots": (-1, 1)},
        {"knots": tuple(range(200))},
        {"sites": ((1,), (1,))},
        {"sites": ((1,), (2, 3))},
        {"sites": ((1,), (-2,))},
        {"sites": ((1,), (2**70,))},
        {"axes": ("m", "m")},
        {"axes": ("m", "n", "k")},
        {"log_seconds": encoded([1.0, 2.0, 3.0])},
        {"log_seconds": encoded([1.0, 2.0, 3.0, float("nan")])},
        {"log_seconds": encoded([1.0, 2.0, 3.0, 1e9])},
        {"log_seconds": "AAA"},
        {"log_seconds": "not base64 \u2603"},
    ],
)
def test_impossible_surfaces_are_refused(spoilt: dict[str, object]) -> None:
    good = Surface(axes=("m", "n"), knots=(1, 2), sites=((1,), (2,)), log_seconds=encoded([0.0, 1.0, 2.0, 3.0]))
    with pytest.raises(InputError, match="surface"):
        replace(good, **spoilt)  # type: ignore[arg-type]


def test_sites_that_floating_point_cannot_tell_apart_are_refused_when_asked() -> None:
    values = encoded([0.0, 1.0, 2.0, 3.0])
    surface = Surface(axes=("m", "n"), knots=(1, 2), sites=((2**62,), (2**62 + 1,)), log_seconds=values)
    with pytest.raises(InputError, match="cannot tell apart"):
        surface.seconds(np.array([1.0]), np.array([3.0]))
