"""A slice: a fitted series along one of its axes, the others held fast, as pictures show it.

Legend: P measured points of the slice; G points of the curve.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...profilers.cases.works import work_of
from ...profilers.fits.fit import Fit, Prediction
from ...profilers.fits.surface import Surface
from ...profilers.predictor import predicted
from ...profilers.series import Series

__all__ = ["Slice", "held_out_errors", "slice_of"]

CURVE_POINTS = 160
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slice:
    """Points measured along `axis`, and the curve fitted to them.

    Parameters
    ----------
    axis, fixed
        What varies, and the values of the other axes that vary in the series.
    at, seconds, rate, error
        `[P]`: the points' place on the axis, their median seconds, their rate, and how far off a fit was that had not
        seen them (NaN where none was).
    curve_at, curve, curve_rate
        `[G]`: the fit along the measured range.
    """

    axis: str
    fixed: Mapping[str, int]
    at: Array
    seconds: Array
    rate: Array
    error: Array
    curve_at: Array
    curve: Prediction
    curve_rate: Array


def slice_of(series: Series, fit: Fit) -> Slice:
    """The slice with the most measured points, along the axis with the most values.

    Where published tables hold the points, a curve that the fit itself holds.
    """
    axis, fixed = _place(series, fit)
    inside = [one for one in series.measurements if all(one.size[name] == value for name, value in fixed.items())]
    inside.sort(key=lambda one: one.size[axis])
    seconds = np.array([one.median_s for one in inside], np.float64)
    off = held_out_errors(fit)
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


def held_out_errors(fit: Fit) -> dict[tuple[int, ...], float]:
    """Size to |model - t| / t of the chosen kind when it had not seen that size, as far as the profile lists them."""
    held = fit.held_out.get(fit.model.kind)
    return {} if held is None else dict(zip(held.sizes, held.errors, strict=True))


def _place(series: Series, fit: Fit) -> tuple[str, dict[str, int]]:
    """The axis to go along and where the others are held."""
    sizes = [one.size for one in series.measurements]
    if sizes:
        axis = max(fit.axes, key=lambda name: len({size[name] for size in sizes}))
        others = [name for name in fit.axes if name != axis]
        (place, _), *_ = Counter(tuple(size[name] for name in others) for size in sizes).most_common(1)
        return axis, dict(zip(others, place, strict=True))
    axis = max(fit.axes, key=lambda name: fit.measured[name][1] / max(1, fit.measured[name][0]))
    site: dict[str, int] = {}
    if isinstance(fit.model, Surface):
        axis, *others = fit.model.axes
        site = dict(zip(others, fit.model.sites[len(fit.model.sites) // 2], strict=True))
    lowest = {name: low for name, (low, _) in fit.measured.items() if name != axis}
    return axis, lowest | site


def _rate(series: Series, work: Array, seconds: Array) -> Array:
    """GB/s through a rank's port (busbw), or TFLOP/s of two operations a multiply-add."""
    return work / seconds * (1e-9 if series.unit == "bytes" else 2e-12)
