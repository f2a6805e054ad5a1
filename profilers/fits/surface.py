"""An n-dimensional model: measured curves over one axis, interpolated between the sites where they were measured.

Legend: S sites (a layer's (n, k)); A axes of a site; C knots of the curves (m); Q points asked for.
"""

import base64
import binascii
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from .sizes import Array, distinct

MAX_KNOTS = 96
MAX_SITES = 2048
MAX_LOG_SECONDS = 100.0
MAX_POWER = 2.0  # of the slope beyond the last knot: attention is quadratic
CHUNK = 256  # points asked for at once: their distances to all sites stay in cache


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Seconds over several axes, through every measured curve.

    Notes
    -----
    With x_s the logs (of 1 + value) of site s and y_s its ln t at a knot, ln t at any x is the smoothest function
    through all sites in the sense of linear-variogram kriging, on a plane:

        ln t(x) = sum_s w_s |x - x_s| + p_0 + p . x,    ln t(x_s) = y_s,    sum_s w_s = 0,    sum_s w_s x_s = 0     (1)

    In one dimension this is straight interpolation. Between knots ln t is straight in the log of the curve's axis;
    constant below the first and along the last octave's slope beyond the last. On GEMMs the plane carries the cost of
    a multiply-add, the distances the steps of tiles, waves and kernel choice, which neighbours share.
    """

    kind: Literal["surface"] = "surface"
    axes: tuple[str, ...]  #: The curve's axis, then those of the sites
    knots: tuple[int, ...]  #: Values of the curve's axis, rising
    sites: tuple[tuple[int, ...], ...]  #: The values along the other axes at which a curve was measured, each once
    log_seconds: str  #: ln t `[S, C]`, float32, little-endian, in base64

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        rising = all(one < two for one, two in itertools.pairwise(self.knots))
        if not (2 <= len(self.knots) <= MAX_KNOTS and rising and self.knots[0] >= 0):
            raise InputError(f"surface of {len(self.knots)} knots; expected 2 to {MAX_KNOTS}, at least 0 and rising")
        same = {len(site) for site in self.sites} == {len(self.axes) - 1} and len(set(self.axes)) == len(self.axes)
        if not (2 <= len(set(self.sites)) == len(self.sites) <= MAX_SITES and same):
            raise InputError(
                f"surface of {len(self.sites)} sites over {len(self.axes)} axes; expected 2 to {MAX_SITES}, each once,"
                " a value for every axis but the first"
            )
        if min(map(min, self.sites)) < 0 or max(map(max, (self.knots, *self.sites))) >= 2**63:
            raise InputError("surface with a site or knot out of range; expected integers from 0 to 2**63 - 1")
        self._decoded  # noqa: B018  refuses what does not decode

    @classmethod
    def of(cls, axes: tuple[str, ...], columns_QA: Array, t: Array) -> Self:
        """The surface through the measured seconds `[Q]`; the first axis is the curves'.

        Notes
        -----
        Each site's curve is read at common knots: every measured value of the first axis, or 96 at even ratios where
        there are more. A site measured at one knot only tells no curve: it takes the slopes that the others give at its
        place, through what was measured.
        """
        knots = np.unique(columns_QA[:, 0])
        if len(knots) > MAX_KNOTS:
            knots = np.unique(np.geomspace(max(knots[0], 1.0), knots[-1], MAX_KNOTS).round())
        first_S, site_Q = distinct(list(columns_QA.T[1:]))
        order = np.lexsort((columns_QA[:, 0], site_Q))
        ends = np.cumsum(np.bincount(site_Q))[:-1]
        groups = np.split(order, ends)
        curves = np.array([_along(_log(knots), _log(columns_QA[at, 0]), np.log(t[at])) for at in groups])
        lone = np.array([len(at) == 1 for at in groups])
        if lone.any() and not lone.all():
            at = np.array([group[0] for group in groups])[lone]
            places = _log(columns_QA[first_S, 1:])
            shapes = _kriged(places[lone], places[~lone], _weights(places[~lone], curves[~lone]))
            curves[lone] = _through(shapes, _log(knots), _log(columns_QA[at, 0]), np.log(t[at]))
        return cls(
            axes=axes,
            knots=tuple(knots.astype(np.int64).tolist()),
            sites=tuple(map(tuple, columns_QA[first_S, 1:].astype(np.int64).tolist())),
            log_seconds=base64.b64encode(curves.astype("<f4").tobytes()).decode(),
        )

    def seconds(self, *columns: Array) -> Array:
        """Seconds at `[Q]` values of each axis."""
        curve_Q, *rest = np.broadcast_arrays(*columns)
        shape, curve_Q = curve_Q.shape, _log(curve_Q.reshape(-1))
        flat = [axis.reshape(-1) for axis in rest]
        first, ask_Q = distinct(flat)
        asked_QA = np.stack([axis[first] for axis in flat], axis=1)
        knots, found_Q = _log(np.array(self.knots)), np.empty(len(curve_Q))
        order = np.argsort(ask_Q, kind="stable")
        starts = range(0, max(len(asked_QA), 1), CHUNK)
        for start, part in zip(starts, np.split(order, np.searchsorted(ask_Q[order], starts[1:])), strict=True):
            curves = _kriged(_log(asked_QA[start : start + CHUNK]), self._places, self._weights)
            found_Q[part] = _read(curve_Q[part], knots, curves, ask_Q[part] - start)
        return np.exp(np.clip(found_Q, -MAX_LOG_SECONDS, MAX_LOG_SECONDS)).reshape(shape)

    @cached_property
    def _decoded(self) -> Array:
        shape = (len(self.sites), len(self.knots))
        try:
            values = np.frombuffer(base64.b64decode(self.log_seconds, validate=True), dtype="<f4").astype(np.float64)
        except (binascii.Error, ValueError) as error:
            raise InputError("surface whose log_seconds do not decode; expected float32 in base64") from error
        if values.size != shape[0] * shape[1] or not (np.abs(values) < MAX_LOG_SECONDS).all():
            raise InputError(
                f"surface of {shape[0]} sites and {shape[1]} knots with {values.size} log_seconds; expected one each,"
                f" finite and within {MAX_LOG_SECONDS}"
            )
        return values.reshape(shape)

    @cached_property
    def _places(self) -> Array:
        """The x of (1), `[S, A]`."""
        return _log(np.array(self.sites))

    @cached_property
    def _weights(self) -> Array:
        """The w and p of (1), `[S + 1 + A, C]`."""
        return _weights(self._places, self._decoded)


def _log(values: NDArray[np.generic]) -> Array:
    return np.log1p(values.astype(np.float64))


def _weights(x_SA: Array, y_SC: Array) -> Array:
    """The w and p of (1), `[S + 1 + A, C]`; without the slopes where the sites do not span them."""
    plane = np.c_[np.ones(len(x_SA)), x_SA]
    if np.linalg.matrix_rank(plane) < plane.shape[1]:
        plane = plane[:, :1]
    corner = np.zeros((plane.shape[1], plane.shape[1]))
    system = np.block([[_distances(x_SA, x_SA), plane], [plane.T, corner]])
    given = np.r_[y_SC, np.zeros((plane.shape[1], y_SC.shape[1]))]
    try:
        return np.asarray(np.linalg.solve(system, given))  # (1)
    except np.linalg.LinAlgError as error:
        raise InputError("surface with sites that floating point cannot tell apart; expected distinct ones") from error


def _kriged(x_QA: Array, x_SA: Array, weights: Array) -> Array:
    """The ln t of (1), `[Q, C]`, at any places."""
    plane = np.c_[np.ones(len(x_QA)), x_QA][:, : len(weights) - len(x_SA)]
    return np.asarray(np.c_[_distances(x_QA, x_SA), plane] @ weights)


def _through(shapes_QC: Array, knots: Array, x_Q: Array, y_Q: Array) -> Array:
    """Curves `[Q, C]` with the slopes of these shapes that take the value `y` at `x`."""
    steps = np.clip(np.diff(shapes_QC, axis=1), 0, MAX_POWER * np.diff(knots))
    rising = np.c_[np.zeros(len(steps)), np.cumsum(steps, axis=1)]
    return np.asarray(rising + (y_Q - _read(x_Q, knots, rising, np.arange(len(rising))))[:, None])


def _distances(x_QA: Array, x_SA: Array) -> Array:
    """Euclidean, `[Q, S]`."""
    squares = np.zeros((len(x_QA), len(x_SA)))
    for one, two in zip(x_QA.T, x_SA.T, strict=True):
        squares += (one[:, None] - two[None]) ** 2
    return np.sqrt(squares, out=squares)


def _along(x: Array, knots: Array, values: Array) -> Array:
    """`values` over rising `knots`, read at `x`."""
    if np.array_equal(x, knots):
        return values
    return _read(x, knots, values[None], np.zeros(len(x), dtype=np.int64))


def _read(x: Array, knots: Array, curves: Array, curve: NDArray[np.int64]) -> Array:
    """Curve number `curve` `[Q]` of `curves` at `x` `[Q]`: straight between knots, the last octave's slope beyond."""
    if len(knots) == 1:
        return np.asarray(curves[curve, 0], dtype=np.float64)
    x = np.maximum(x, knots[0])
    left = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
    share = np.minimum((x - knots[left]) / (knots[left + 1] - knots[left]), 1)
    inside = curves[curve, left] * (1 - share) + curves[curve, left + 1] * share
    octave = max(int(np.searchsorted(knots, knots[-1] - np.log(2) + 1e-9)) - 1, 0)
    slope = np.clip((curves[curve, -1] - curves[curve, octave]) / (knots[-1] - knots[octave]), 0, MAX_POWER)
    return np.asarray(inside + slope * np.maximum(x - knots[-1], 0))
