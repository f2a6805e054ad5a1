"""Seconds of a device's experts: a law of reading weights and multiplying, corrected where it was measured.

Legend: T token-expert pairs of the device; E its experts; M hidden size; H expert FFN size; t seconds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import numpy as np

from ...errors import InputError
from ..measurement import MAX_SECONDS
from .laws import MIN_SLOPE, least_relative
from .sizes import Array
from .surface import Surface

AXES = ("tokens", "experts", "hidden", "ffn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLaw:
    """t = c0 + w min(T, E) M H + p T M H + r T M: to start, weights, products, rows; none negative.

    A call reads the weights of every expert that has a pair, of at most T of the E.
    """

    start_s: float  #: c0
    #: weight_s, product_s: w, seconds a weight of one of an expert's three matrices; p, seconds a multiply-add of one
    weight_s: float
    product_s: float
    row_s: float  #: r, seconds an element of the rows that are sorted, gathered and summed

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        coefficients = (self.start_s, self.weight_s, self.product_s, self.row_s)
        if not (all(value >= 0 for value in coefficients) and MIN_SLOPE <= max(coefficients) < MAX_SECONDS):
            raise InputError(
                f"experts' law with coefficients {coefficients}; expected none negative, not all 0, below a day"
            )

    @classmethod
    def of(cls, tokens: Array, experts: Array, hidden: Array, ffn: Array, *, t: Array) -> Self:
        """The coefficients of least relative error."""
        start_s, weight_s, product_s, row_s = least_relative(_terms(tokens, experts, hidden, ffn), t)
        return cls(start_s=start_s, weight_s=weight_s, product_s=product_s, row_s=row_s)

    def seconds(self, tokens: Array, experts: Array, hidden: Array, ffn: Array) -> Array:
        """Seconds of `tokens` pairs on `experts` experts."""
        terms = _terms(tokens, experts, hidden, ffn)
        return np.asarray(terms @ np.array([self.start_s, self.weight_s, self.product_s, self.row_s]))


@dataclass(frozen=True, kw_only=True)
class ExpertSurface:
    """The law times the ratio measured / law: kriged between the sites measured, kept at its last value beyond them.

    Notes
    -----
    With x the logs of a size and x' the nearest that lies within the measured range of every axis,

        t(x) = law(x) ratio(x')

    so that a device with fewer experts, or larger ones, than any measured reads its own weights and multiplies its own
    rows at the rates of the nearest sites, where the logs of seconds alone would be drawn out along a plane.
    """

    kind: Literal["experts"] = "experts"
    law: ExpertLaw
    ratio: Surface  #: Of measured seconds to the law's; without the axes that do not vary

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    @classmethod
    def of(cls, varying: tuple[str, ...], columns: dict[str, Array], t: Array) -> Self:
        """The surface through the measured seconds.

        Parameters
        ----------
        varying
            The axes of the ratio, the curves' first.
        columns
            Of these and of the law's axes, `[Q]` each.
        """
        law = ExpertLaw.of(*(columns[axis] for axis in AXES), t=t)
        ratio = t / law.seconds(*(columns[axis] for axis in AXES))
        return cls(law=law, ratio=Surface.of(varying, np.stack([columns[axis] for axis in varying], axis=1), ratio))

    @property
    def axes(self) -> tuple[str, ...]:
        """The law's axes, and others along which the ratio varies."""
        return (*AXES, *(axis for axis in self.ratio.axes if axis not in AXES))

    def seconds(self, *columns: Array) -> Array:
        """Seconds at `[Q]` values of each axis."""
        named = dict(zip(self.axes, columns, strict=True))
        inside = (np.clip(named[axis], *self._ranges[axis]) for axis in self.ratio.axes)
        return np.asarray(self.law.seconds(*(named[axis] for axis in AXES)) * self.ratio.seconds(*inside))

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        """The least and largest value along each axis of the ratio."""
        columns = (self.ratio.knots, *zip(*self.ratio.sites, strict=True))
        return {axis: (min(column), max(column)) for axis, column in zip(self.ratio.axes, columns, strict=True)}


def _terms(tokens: Array, experts: Array, hidden: Array, ffn: Array) -> Array:
    """Terms that the coefficients of the law multiply, `[..., 4]`."""
    tokens, experts, hidden, ffn = np.broadcast_arrays(tokens, experts, hidden, ffn)
    matrix = hidden * ffn
    ones = np.ones(tokens.shape)
    return np.stack([ones, np.minimum(tokens, experts) * matrix, tokens * matrix, tokens * hidden], axis=-1)
