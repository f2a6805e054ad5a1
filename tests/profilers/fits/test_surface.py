"""The n-dimensional model: exact where it was measured, and between as its docstring's equation says."""

import base64
import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.interpolate import RBFInterpolator

from moeplan.errors import InputError
from moeplan.profilers.fits.surface import Surface

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
