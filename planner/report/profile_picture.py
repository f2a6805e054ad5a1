"""Pictures of a profile: every fitted series with its points, its curve and the sizes held out.

A slice is a fitted series along one of its axes, the others held fast. Legend: P measured points of the slice; G
points of the curve.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...profilers.cases.works import work_of
from ...profilers.fits.experts import ExpertSurface
from ...profilers.fits.fit import Fit, Prediction
from ...profilers.fits.roofline import Roofline
from ...profilers.fits.surface import Surface
from ...profilers.predictor import predicted
from ...profilers.profile import Profile
from ...profilers.series import Series
from ...solvers.arrays import Floats
from ..document import Section, Text, write_page
from ..figures import TimeUnit, percent
from ..picture import BLUE, GREY, ORANGE, RED, Axis, Line, Plot

CURVE_POINTS = 160
RED_POINTS = (
    "Red: sizes that were held out, each with how far off a fit was that had not seen it; the curve, and what is"
    " predicted of every size, are of the fit to all sizes."
)
ROWS = 9
LABEL = 9  # columns of the seconds beside a plot


@dataclass(frozen=True, slots=True)
class Slice:
    """Points measured along `axis`, and the curve fitted to them."""

    axis: str
    fixed: Mapping[str, int]  #: The values of the other axes that vary in the series
    at: Floats  #: The points' places on the axis, `[P]`
    seconds: Floats  #: Their means, `[P]`
    rate: Floats  #: `[P]`
    error: Floats  #: How far off a fit was that had not seen them, `[P]`; NaN where none was
    #: curve_at, curve, curve_rate: `[G]`: the fit along the measured range
    curve_at: Floats
    curve: Prediction
    curve_rate: Floats


def write_profile_page(profile: Profile, path: Path) -> None:
    """Write a picture of every fitted series as one page that needs no network; errors as in `write_page`."""
    fitted = [(series, series.fit) for series in profile.series.values() if series.fit is not None]
    text = f"{len(fitted)} fitted series, {profile.cluster}. Blue: the fit, with the interval that its words tell of."
    write_page(path, "Profile", f"{text} {RED_POINTS}", (_section(*pair) for pair in fitted))


def text_picture(profile: Profile, width: int) -> Iterator[str]:
    """Curves for a terminal: seconds over size, both logarithmic; `o` measured, `x` held out, `.` the fit."""
    for series in profile.series.values():
        if series.fit is not None:
            along = slice_of(series, series.fit)
            yield ""
            yield from _plot(along, [series.key, *_words(series.fit, along)], width)


def slice_of(series: Series, fit: Fit) -> Slice:
    """The slice with the most measured points, along the axis with the most values.

    Where published tables hold the points, a curve that the fit itself holds.
    """
    axis, fixed = _along(series, fit)
    inside = [one for one in series.measurements if fixed.items() <= dict(one.size).items()]
    inside.sort(key=lambda one: one.size[axis])
    seconds = np.array([one.mean_s for one in inside], np.float64)
    held = fit.held_out.get(fit.model.kind)
    off = {} if held is None else dict(zip(held.sizes, held.errors, strict=True))
    low, high = fit.measured[axis]
    curve_at = np.unique(np.geomspace(max(low, 1), max(high, 1), CURVE_POINTS).round())
    size = {axis: curve_at} | {name: np.array(float(value)) for name, value in fixed.items()}
    curve, curve_work = predicted(series, size), work_of(series.case, size, series.ranks)
    return Slice(
        axis=axis,
        fixed={name: value for name, value in fixed.items() if len(set(fit.measured[name])) > 1},
        at=np.array([one.size[axis] for one in inside], np.float64),
        seconds=seconds,
        rate=_rate(series, np.array([one.work for one in inside], np.float64), seconds),
        error=np.array([off.get(tuple(one.size[name] for name in fit.axes), np.nan) for one in inside], np.float64),
        curve_at=curve_at,
        curve=curve,
        curve_rate=_rate(series, curve_work, curve.seconds),
    )


def _along(series: Series, fit: Fit) -> tuple[str, dict[str, int]]:
    """The axis to go along and where the others are held."""
    sizes = [one.size for one in series.measurements]
    if sizes:
        axis = max(fit.axes, key=lambda name: len({size[name] for size in sizes}))
        others = [name for name in fit.axes if name != axis]
        (place, _), *_ = Counter(tuple(size[name] for name in others) for size in sizes).most_common(1)
        return axis, dict(zip(others, place, strict=True))
    axis = max(fit.axes, key=lambda name: fit.measured[name][1] / max(1, fit.measured[name][0]))
    site: dict[str, int] = {}
    surface = fit.model.ratio if isinstance(fit.model, ExpertSurface) else fit.model
    if isinstance(surface, Surface):
        axis, *others = surface.axes
        site = dict(zip(others, surface.sites[len(surface.sites) // 2], strict=True))
    if isinstance(fit.model, Roofline):
        axis, site = "length", dict(fit.model.drawn_at)
    lowest = {name: low for name, (low, _) in fit.measured.items() if name != axis}
    return axis, lowest | site


def _rate(series: Series, work: Floats, seconds: Floats) -> Floats:
    """GB/s through a rank's port (busbw), or TFLOP/s of two operations a multiply-add."""
    return work / seconds * (1e-9 if series.unit == "bytes" else 2e-12)


def _section(series: Series, fit: Fit) -> Section:
    """A series: seconds and rate along a slice; where several axes vary, predictions of every size."""
    along = slice_of(series, fit)
    curve, held, at = along.curve, np.isfinite(along.error), along.curve_at
    unseen = zip(along.at[held], along.error[held], strict=True)
    off = [f"{size:,.0f}: off by {percent(error, 1)}" for size, error in unseen]
    lines = [
        Line(at, curve.seconds, "fit", BLUE, low=curve.low, high=curve.high),
        Line(along.at[~held], along.seconds[~held], "measured", GREY, "dots"),
        Line(along.at[held], along.seconds[held], "held out", RED, "dots", words=off),
    ]
    rates = [Line(at, along.curve_rate, "fit", BLUE), Line(along.at, along.rate, "measured", GREY, "dots")]
    across = Axis(along.axis, log=True)
    rate = "GB/s (busbw)" if series.unit == "bytes" else "TFLOP/s"
    pictures = [
        Plot("", lines, across, Axis("time of a call", log=True, text=TimeUnit.worded)),
        Plot("", rates, across, Axis(rate, zero=True)),
    ]
    if along.fixed and series.measurements:
        pictures.append(_predicted(series, fit))
    return Section(series.key, (Text.of("; ".join(_words(fit, along))), *pictures))


def _predicted(series: Series, fit: Fit) -> Plot:
    """Predicted against measured seconds of every size, all of them fitted to; on the diagonal both are equal."""
    sizes = [dict(one.size) for one in series.measurements]
    seconds = np.array([one.mean_s for one in series.measurements])
    fitted = predicted(series, {name: np.array([size[name] for size in sizes], np.float64) for name in fit.axes})
    names = [", ".join(f"{name} {value:,}" for name, value in size.items()) for size in sizes]
    ends = [min(seconds.min(), fitted.seconds.min()), max(seconds.max(), fitted.seconds.max())]
    lines = [
        Line(ends, ends, "as measured", GREY, "dashed"),
        Line(seconds, fitted.seconds, "size", ORANGE, "dots", words=names),
    ]
    x, y = (Axis(title, log=True, text=TimeUnit.worded) for title in ("measured", "predicted, fitted to all"))
    return Plot("", lines, x, y)


def _words(fit: Fit, along: Slice) -> list[str]:
    """The kind of fit, its errors on sizes it had not seen, and where the slice is."""
    words = ["roofline, not measured" if fit.model.kind == "roofline" else f"fit: {fit.model.kind}"]
    held = fit.held_out.get(fit.model.kind)
    if held is not None:
        errors = f"median {percent(held.median_error, 1)}, worst {percent(held.worst_error, 1)}"
        words.append(f"off by {errors} on {held.num_sizes} sizes held out; interval: {held.interval}")
    if along.fixed:
        words.append("at " + ", ".join(f"{name} {value:,}" for name, value in along.fixed.items()))
    return words


def _plot(along: Slice, words: list[str], width: int) -> Iterable[str]:
    """A log-log plot in characters, with its words above and its axis below."""
    columns = max(16, width - LABEL - 3)
    times = np.concatenate([along.seconds, along.curve.seconds])
    rows = [[" "] * columns for _ in range(ROWS)]
    held = np.isfinite(along.error)
    for sign, x, y in (
        (".", along.curve_at, along.curve.seconds),
        ("o", along.at[~held], along.seconds[~held]),
        ("x", along.at[held], along.seconds[held]),
    ):
        across = _places(x, along.curve_at, columns)
        for row, column in zip(_places(y, times, ROWS), across, strict=True):
            rows[ROWS - 1 - row][column] = sign
    yield from textwrap.wrap("  ".join(words), width)
    labels = {0: TimeUnit.worded(times.max()), ROWS - 1: TimeUnit.worded(times.min())}
    for number, line in enumerate(map("".join, rows)):
        yield f"{labels.get(number, ''):>{LABEL}} |{line.rstrip()}"
    first, last = f"{along.curve_at[0]:,.0f}", f"{along.curve_at[-1]:,.0f}"
    yield f"{'':>{LABEL}} +{first} {along.axis:^{max(1, columns - len(first) - len(last) - 2)}} {last}"


def _places(values: Any, span: Any, cells: int) -> list[int]:
    """The cell of each value when the logarithms of `span` are cut into `cells`."""
    low, high = np.log(span.min()), np.log(span.max())
    shares = (np.log(np.maximum(values, 1e-300)) - low) / max(high - low, 1e-9)
    places: list[int] = (shares.clip(0, 1) * (cells - 1)).round().astype(int).tolist()
    return places
