"""Pictures of a profile: what they hold is what was measured and what the fit predicts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.report import profile_picture
from moeplan.planner.report.profile_picture import slice_of, text_picture, write_profile_page
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fit import Fit
from moeplan.profilers.fits.fitting import fit_series
from moeplan.profilers.measurement import Measurement
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import Series
from tests.builders import known, measured_profile, series
from tests.planner.makers import figure_in

BYTES = [{"bytes": 2**power} for power in range(10, 22)]
SHAPES = [{"m": m, "n": n, "k": k} for m in (1, 32, 1024) for n, k in ((512, 256), (256, 256), (256, 512))]


def series_of(case: str, sizes: list[dict[str, int]], ranks: int = 1) -> Series:
    """A series whose times are 20 us and 1 ns a unit of work, 10 % more for every third size."""
    plain, taken = series(case, ranks, sizes=sizes, a_s=2e-5), []
    for number, one in enumerate(plain.measurements):
        seconds = one.median_s * (1.1 if number % 3 == 0 else 1.0)
        taken.append(Measurement.of(one.size, one.work, [seconds] * 3))
    return plain.model_copy(update={"measurements": tuple(taken), "fit": fit_series(CASES[case], ranks, taken)})


def profile_of(*measured: Series) -> Profile:
    return measured_profile(Cluster.parse("1x4"), *measured)


def fit_of(series: Series) -> Fit:
    return known(series.fit)


def figure_of(series: Series) -> Any:
    return figure_in(profile_picture._section(series, fit_of(series)))


def drawn(figure: Any, panel: int, name: str) -> Any:
    axis = "x" if panel == 1 else f"x{panel}"
    (line,) = [trace for trace in figure.data if (trace.xaxis or "x") == axis and trace.name == name]
    return line


def test_a_series_of_one_axis_is_drawn_with_its_curve_band_and_held_out_points() -> None:
    series = series_of("all_to_all", BYTES, 4)
    figure = figure_of(series)
    held = fit_of(series).held_out[fit_of(series).model.kind]
    off = dict(zip(held.sizes, held.errors, strict=True))
    points = drawn(figure, 1, "measured"), drawn(figure, 1, "held out")
    assert len(off) == len(points[1].x) > 0
    together = sorted(zip(np.concatenate([p.x for p in points]), np.concatenate([p.y for p in points]), strict=True))
    assert together == [(one.size["bytes"], one.median_s) for one in series.measurements]
    assert list(points[1].text) == [f"off by {off[int(x),]:.1%}" for x in points[1].x]
    curve, band = drawn(figure, 1, "fit"), figure.data[0]
    work: Any = CASES["all_to_all"].work({"bytes": np.asarray(curve.x)}, 4)  # type: ignore[dict-item]
    expected = fit_of(series).predict({"bytes": curve.x}, work)
    np.testing.assert_allclose(curve.y, expected.seconds)
    np.testing.assert_allclose(band.y, np.concatenate([expected.low, expected.high[::-1]]))
    assert (curve.x[0], curve.x[-1]) == (2**10, 2**21)


def test_the_rate_is_bytes_through_the_port_or_two_operations_a_multiply_add() -> None:
    sent, computed = series_of("all_to_all", BYTES, 4), series_of("gemm", SHAPES)
    points = drawn(figure_of(sent), 2, "measured")
    assert list(points.y) == pytest.approx([one.work / one.median_s * 1e-9 for one in sent.measurements])
    points, slice_m = drawn(figure_of(computed), 2, "measured"), [1, 32, 1024]
    assert list(points.x) == slice_m
    macs = [one.work / one.median_s for one in computed.measurements if (one.size["n"], one.size["k"]) == (512, 256)]
    assert list(points.y) == pytest.approx([2e-12 * rate for rate in macs])


def test_a_series_of_several_axes_sets_predicted_against_measured() -> None:
    series = series_of("gemm", SHAPES)
    figure = figure_of(series)
    points = drawn(figure, 3, "size")
    assert list(points.x) == [one.median_s for one in series.measurements]
    for one, seconds in zip(series.measurements, points.y, strict=True):
        assert seconds == pytest.approx(float(fit_of(series).predict(one.size, one.work).seconds))
    assert points.marker.color != profile_picture.RED  # the fit has seen them all
    assert "fitted to all" in figure.layout.xaxis3.title.text + figure.layout.yaxis3.title.text
    along = slice_of(series, fit_of(series))
    assert (along.axis, dict(along.fixed)) == ("m", {"n": 512, "k": 256})


def test_a_series_without_measurements_is_its_curve() -> None:
    series = series_of("gemm", SHAPES).model_copy(update={"measurements": ()})
    figure = figure_of(series)
    assert len(drawn(figure, 1, "measured").x) == 0
    curve = drawn(figure, 1, "fit")
    assert np.isfinite(curve.y).all()
    assert min(curve.y) > 0


def test_the_page_has_a_section_for_every_fitted_series(tmp_path: Path) -> None:
    unfitted = series_of("all_to_all", BYTES[:1], 2)
    profile = profile_of(series_of("all_to_all", BYTES, 4), series_of("gemm", SHAPES), unfitted)
    write_profile_page(profile, tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "<h2>all_to_all/uint8@4</h2>" in text
    assert "<h2>gemm/uint8</h2>" in text
    assert "@2</h2>" not in text
    assert len(text) < 8e6


@pytest.mark.parametrize("width", [40, 80, 132])
def test_the_text_fits_its_width_and_shows_every_point_on_the_curve(width: int) -> None:
    lines = list(text_picture(profile_of(series_of("all_to_all", BYTES, 4)), width))
    assert max(map(len, lines)) <= width
    plot = [line.split("|", 1)[1] for line in lines if "|" in line]
    signs = "".join(plot)
    assert signs.count("o") + signs.count("x") == len(BYTES)
    assert "x" in signs
    rows = [min(row for row, line in enumerate(plot) if len(line) > x and line[x] in "ox") for x in columns_of(plot)]
    assert rows == sorted(rows, reverse=True)  # time grows with bytes
    assert "1,024" in lines[-1]
    assert "2,097,152" in lines[-1]


def columns_of(plot: list[str]) -> list[int]:
    return [x for x in range(max(map(len, plot))) if any(len(line) > x and line[x] in "ox" for line in plot)]


def test_a_profile_without_fits_is_an_empty_picture(tmp_path: Path) -> None:
    assert list(text_picture(profile_of(), 80)) == []
    write_profile_page(profile_of(), tmp_path / "p.html")
    assert "0 fitted series" in (tmp_path / "p.html").read_text()
