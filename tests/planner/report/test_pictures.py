"""Pictures of profiles and of traces: what figures hold, that they fit a screen, and that pages stay small."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.planner.document import Section
from moeplan.planner.picture import RED, heat
from moeplan.planner.report import profile_picture
from moeplan.planner.report import trace as trace_page
from moeplan.planner.report.profile_picture import slice_of, text_picture, write_profile_page
from moeplan.planner.report.trace import write_trace_page
from moeplan.profilers.cases import CASES
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.fits.fit import Fit
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import Series
from moeplan.traces.statistics import Statistics, describe, describe_counts
from tests.builders import known, measured_profile, series
from tests.planner.makers import counted, pictures_in

NAMES = [str(layer) for layer in range(64)]
BYTES = [{"bytes": 2**power} for power in range(10, 22)]
SHAPES = [{"m": m, "n": n, "k": k} for m in (1, 32, 1024) for n, k in ((512, 256), (256, 256), (256, 512))]


def series_of(case: str, sizes: list[dict[str, int]], ranks: int = 1) -> Series:
    """A series whose times are 20 us and 1 ns a unit of work, 10 % more for every third size."""
    factors = itertools.cycle((1.1, 1.0, 1.0))
    return series(case, ranks, sizes=sizes, a_s=2e-5, noise=lambda: next(factors))


def profile_of(*measured: Series) -> Profile:
    return measured_profile(Cluster.parse("1x4"), *measured)


def fit_of(series: Series) -> Fit:
    return known(series.fit)


def pictures_of(series: Series) -> list[Any]:
    return pictures_in(profile_picture._section(series, fit_of(series)))


def drawn(picture: Any, name: str) -> Any:
    (line,) = [line for line in picture.lines if line.name == name]
    return line


def test_a_series_of_one_axis_is_drawn_with_its_curve_band_and_held_out_points() -> None:
    series = series_of("all_to_all", BYTES, 4)
    times, _ = pictures_of(series)
    held = fit_of(series).held_out[fit_of(series).model.kind]
    off = dict(zip(held.sizes, held.errors, strict=True))
    points = drawn(times, "measured"), drawn(times, "held out")
    assert len(off) == len(points[1].x) > 0
    together = sorted(zip(np.concatenate([p.x for p in points]), np.concatenate([p.y for p in points]), strict=True))
    assert together == [(one.size["bytes"], one.mean_s) for one in series.measurements]
    words = [f"{x:,.0f}: off by {100 * off[int(x),]:.1f} %" for x in points[1].x]
    assert list(points[1].words) == words
    curve = drawn(times, "fit")
    work: Any = CASES["all_to_all"].work({"bytes": np.asarray(curve.x)}, 4)  # type: ignore[dict-item]
    expected = fit_of(series).predict({"bytes": curve.x}, work)
    np.testing.assert_allclose([curve.y, curve.low, curve.high], [expected.seconds, expected.low, expected.high])
    assert (curve.x[0], curve.x[-1]) == (2**10, 2**21)


def test_the_rate_is_bytes_through_the_port_or_two_operations_a_multiply_add() -> None:
    sent, computed = series_of("all_to_all", BYTES, 4), series_of("gemm", SHAPES)
    points = drawn(pictures_of(sent)[1], "measured")
    assert list(points.y) == pytest.approx([one.work / one.mean_s * 1e-9 for one in sent.measurements])
    points, slice_m = drawn(pictures_of(computed)[1], "measured"), [1, 32, 1024]
    assert list(points.x) == slice_m
    macs = [one.work / one.mean_s for one in computed.measurements if (one.size["n"], one.size["k"]) == (512, 256)]
    assert list(points.y) == pytest.approx([2e-12 * rate for rate in macs])


def test_a_series_of_several_axes_sets_predicted_against_measured() -> None:
    series = series_of("gemm", SHAPES)
    *_, picture = pictures_of(series)
    points = drawn(picture, "size")
    assert list(points.x) == [one.mean_s for one in series.measurements]
    for one, seconds in zip(series.measurements, points.y, strict=True):
        assert seconds == pytest.approx(float(fit_of(series).predict(one.size, one.work).seconds))
    assert points.colour != RED  # the fit has seen them all
    assert "fitted to all" in picture.x.title + picture.y.title
    along = slice_of(series, fit_of(series))
    assert (along.axis, dict(along.fixed)) == ("m", {"n": 512, "k": 256})


def test_a_series_without_measurements_is_its_curve() -> None:
    series = series_of("gemm", SHAPES).model_copy(update={"measurements": ()})
    times, _ = pictures_of(series)
    assert len(drawn(times, "measured").x) == 0
    curve = drawn(times, "fit")
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
    assert (tmp_path / "p.html").stat().st_size < 2e6


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


def sections_of(statistics: Any) -> dict[str, Section]:
    return {section.title: section for section in trace_page._sections(statistics, NAMES[: len(statistics.loads)])}


def test_pictures_hold_the_shares_of_plain_loops(make_trace: Any) -> None:
    statistics: Any = describe(make_trace(layers=3, experts=8, top_k=2, samples=40), coactivation=True)
    sections = sections_of(statistics)
    assert len(sections) == 5
    (loads,) = pictures_in(sections["Loads"])
    np.testing.assert_allclose(loads.table, statistics.loads / statistics.loads.mean(axis=1, keepdims=True))
    for title in ("Transitions", "Co-activation"):
        table = getattr(statistics.tokens.counts, title.lower().replace("-", ""))
        maps = pictures_in(sections[title])
        for drawn, counts in zip(maps, table, strict=True):
            np.testing.assert_allclose(drawn.table, counts / np.maximum(1, counts.sum(axis=1, keepdims=True)))
        assert {drawn.top for drawn in maps} == {max(drawn.table.max() for drawn in maps)}  # one scale
    (information,) = pictures_in(sections["What a layer tells of the next"])
    recorded, shuffled = information.lines
    assert list(recorded.y) == statistics.tokens.information.bits.tolist()
    assert list(shuffled.y) == statistics.tokens.information.shuffled.tolist()
    (locality,) = pictures_in(sections["Locality of samples"])
    assert list(locality.lines[0].y) == statistics.locality.index.tolist()


def test_a_map_a_pair_of_layers_says_which(make_trace: Any) -> None:
    maps = pictures_in(sections_of(describe(make_trace(layers=4)))["Transitions"])
    assert [drawn.title for drawn in maps] == ["0 to 1", "1 to 2", "2 to 3"]


def test_layer_axes_have_whole_ticks_that_name_the_hidden_layer_where_it_differs(make_trace: Any) -> None:
    statistics: Any = describe(make_trace(layers=3), coactivation=True)
    names = trace_page._layer_names((0, 3, 5))
    sections = {section.title: pictures_in(section) for section in trace_page._sections(statistics, names)}
    for axis in (sections["Loads"][0].y, sections["Locality of samples"][0].x):
        assert axis.title == "layer (hidden layer)"
        assert [*axis.ticks] == [(0, "0"), (1, "1 (3)"), (2, "2 (5)")]
    assert [drawn.title for drawn in sections["Transitions"]] == ["0 to 1 (3)", "1 (3) to 2 (5)"]
    many = trace_page._layer_axis(trace_page._layer_names(range(60)))
    assert (many.title, [at for at, _ in many.ticks]) == ("layer", [*range(0, 60, 3)])


def test_many_experts_are_drawn_in_groups_that_say_so(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics: Any = describe(make_trace(layers=3, experts=8, samples=60))
    monkeypatch.setattr(heat, "MAX_CELLS", 2 * 3 * 3)
    section = sections_of(statistics)["Transitions"]
    assert "groups of 3 experts" in section.body[0].lines[0]  # type: ignore[union-attr]
    first = statistics.tokens.counts.transitions[0]
    z = pictures_in(section)[0].table
    assert z.shape == (3, 3)
    assert z[0, 2] == pytest.approx(first[:3, 6:].sum() / first[:3].sum(), rel=1e-5)
    assert z[2, 1] == pytest.approx(first[6:, 3:6].sum() / first[6:].sum(), rel=1e-5)


def test_counts_have_loads_and_locality_only(make_trace: Any, tmp_path: Path) -> None:
    counts = counted(make_trace(), tmp_path / "counts")
    assert list(sections_of(describe_counts(counts))) == ["Loads", "Locality of samples"]
    write_trace_page(counts, describe_counts(counts), tmp_path / "p.html")
    assert "Routing of random" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("shape", [{"layers": 1}, {"top_k": 1}, {"unrouted": 1.0}, {"columns": ()}])
def test_a_trace_with_little_in_it_is_drawn_too(make_trace: Any, tmp_path: Path, shape: dict[str, Any]) -> None:
    trace = make_trace(**shape)
    write_trace_page(trace, describe(trace, coactivation=True), tmp_path / "p.html")
    assert "<h2>Loads</h2>" in (tmp_path / "p.html").read_text()


def test_a_page_warns_of_random_tokens_as_the_screen_does(
    make_trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = make_trace()
    monkeypatch.setattr(Statistics, "as_of_random_tokens", property(lambda _: True))
    write_trace_page(trace, describe(trace), tmp_path / "p.html")
    assert "Recordings of random tokens look so" in (tmp_path / "p.html").read_text()


def test_loads_of_few_tokens_are_over_their_mean(make_trace: Any) -> None:
    statistics: Any = describe(make_trace(samples=1, tokens=2, experts=8, top_k=1))
    (loads,) = pictures_in(sections_of(statistics)["Loads"])
    np.testing.assert_allclose(loads.table.mean(axis=1), 1.0)
