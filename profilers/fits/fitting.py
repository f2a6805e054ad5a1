"""Fitting: every kind of model that suits the sizes, tried on sizes held out, the best kept."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cases.case import Case
from ..measurement import PAIR, Measurement
from .experts import AXES, ExpertSurface
from .fit import Fit, HeldOut, Model, interval
from .laws import SEQUENCES, AlphaBeta, AttentionLaw
from .piecewise import MAX_KNOTS, Piecewise
from .sizes import Array, Sizes, distinct, folds
from .surface import MAX_SITES, Surface

Mask = NDArray[np.bool_]
Fitter = Callable[[Sizes], Model]
FITTERS: dict[str, Fitter] = {  # simplest first
    "alpha_beta": lambda seen: AlphaBeta.of(seen.works, seen.seconds),
    "piecewise": lambda seen: Piecewise.of(seen.works, seen.seconds, "piecewise"),
    "piecewise_linear": lambda seen: Piecewise.of(seen.works, seen.seconds, "piecewise_linear"),
    "attention": lambda seen: AttentionLaw.of(
        *seen.along((*SEQUENCES, *(["calls"] if "calls" in seen.varying else []))), t=seen.seconds
    ),
    "surface": lambda seen: Surface.of(seen.varying, np.stack(seen.along(seen.varying), axis=1), seen.seconds),
    "experts": lambda seen: ExpertSurface.of(
        seen.varying, dict(zip(seen.axes, seen.along(seen.axes), strict=True)), seen.seconds
    ),
}


def fit_series(case: Case, ranks: int, measurements: Sequence[Measurement]) -> Fit | None:
    """Fit of the measurements of a case on `ranks` ranks; None for fewer than two works.

    Numbers of ranks are no amounts to fit over: equal sizes of several pairs are one, at the median of their seconds.
    """
    axes = tuple(axis for axis in measurements[0].size if axis not in PAIR) if measurements else ()
    size = {axis: np.array([one.size[axis] for one in measurements], dtype=np.int64) for axis in axes}
    works = np.array([case.work(one.size, ranks) for one in measurements], dtype=np.float64)
    return fit_arrays(size, works, np.array([one.mean_s for one in measurements]), curve=case.curve)


def fit_arrays(
    size: Mapping[str, NDArray[np.int64]], works: Array, seconds: Array, *, curve: str | None = None
) -> Fit | None:
    """The fit of seconds measured at sizes; None for fewer than two works.

    Parameters
    ----------
    size
        Axis to its value at each measurement; equal sizes are one, at the median of their seconds.
    works, seconds
        Units of work and seconds of each measurement, above 0.
    curve
        The axis of curves that the fit goes through, where they suit: then no other kind is tried.
    """
    if not len(works):
        return None
    sizes = Sizes.merged(size, works, seconds)
    if len(np.unique(sizes.works)) < 2:
        return None
    held, ratios = _tried(sizes, curve)
    held_out = {kind: HeldOut.of(sizes.points[held], np.abs(1 / ratio - 1)) for kind, ratio in ratios.items()}
    best = min(held_out, key=lambda kind: held_out[kind].median_error, default="alpha_beta")
    low, high = interval(ratios.get(best, np.array([])))
    ranges = zip(sizes.points.min(axis=0).tolist(), sizes.points.max(axis=0).tolist(), strict=True)
    return Fit(
        axes=sizes.axes,
        model=FITTERS[best](sizes),
        alpha_beta=AlphaBeta.of(sizes.works, sizes.seconds),
        held_out=held_out,
        low_factor=low,
        high_factor=high,
        measured=dict(zip(sizes.axes, ranges, strict=True)),
        works=(float(sizes.works.min()), float(sizes.works.max())),
        least_s=float(sizes.seconds.min()),
    )


def _tried(sizes: Sizes, curve: str | None) -> tuple[Mask, dict[str, Array]]:
    """Mask of the sizes held out, `[S]`, and measured / predicted seconds of each kind on these."""
    held = folds(sizes, curve)
    parts = [sizes, *(sizes.where(~unseen) for unseen in held)] if held else []
    kinds = [kind for kind in FITTERS if parts and all(_suits(kind, part) for part in parts)]
    if curve is not None and sizes.varying[:1] == (curve,):  # a line over work is no curve
        kinds = ["surface"] if "surface" in kinds else [kind for kind in kinds if kind != "alpha_beta"]
    predicted = {kind: np.full(len(sizes.works), np.nan) for kind in kinds}
    for unseen, seen in zip(held, parts[1:], strict=True):
        for kind in kinds:
            model = FITTERS[kind](seen)
            predicted[kind][unseen] = model.seconds(*sizes.where(unseen).along(model.axes))
    tried = np.any(held, axis=0) if held else np.zeros(len(sizes.works), dtype=bool)
    return tried, {kind: sizes.seconds[tried] / found[tried] for kind, found in predicted.items()}


def _suits(kind: str, seen: Sizes) -> bool:
    """Check whether a kind can be fitted to these sizes; calls take time and do no work, which a line does not know."""
    if "calls" in seen.varying and kind not in ("attention", "surface"):
        return False
    if kind == "attention":
        return set(SEQUENCES) <= set(seen.axes) <= {*SEQUENCES, "calls"}
    if kind == "experts" and not (set(AXES) <= set(seen.axes) <= {*AXES, "grouped"}):
        return False
    if kind in ("surface", "experts"):
        sites = seen.along(seen.varying[1:])
        return len(sites) > 0 and len(distinct(sites)[0]) <= min(MAX_SITES, len(seen.works) - 1)  # one has a curve
    return kind == "alpha_beta" or 1 < len(np.unique(seen.works)) <= MAX_KNOTS
