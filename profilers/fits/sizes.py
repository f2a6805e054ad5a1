"""Distinct sizes and their seconds: those that models are fitted to, and those held out.

Legend: S sizes; A axes; F folds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NUM_FOLDS = 5
SEED = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Distinct sizes, their work and their seconds."""

    axes: tuple[str, ...]  #: What names a size
    points: NDArray[np.int64]  #: Values along the axes, `[S, A]`
    #: works, seconds: of each, `[S]`
    works: Array
    seconds: Array

    @classmethod
    def merged(cls, size: Mapping[str, NDArray[np.int64]], works: Array, seconds: Array) -> Self:
        """Distinct sizes, each with the median of its seconds."""
        first, place = distinct(list(size.values()))
        ranked = seconds[np.lexsort((seconds, place))]
        counts = np.bincount(place)
        start = np.cumsum(counts) - counts
        medians = (ranked[start + (counts - 1) // 2] + ranked[start + counts // 2]) / 2
        points = np.stack([column[first] for column in size.values()], axis=1)
        return cls(tuple(size), points, works[first], medians)

    @property
    def varying(self) -> tuple[str, ...]:
        """The axes with more than one value, the one with the most values first: m of a GEMM."""
        counts = {axis: len(np.unique(column)) for axis, column in zip(self.axes, self.points.T, strict=True)}
        found = [axis for axis in self.axes if counts[axis] > 1]
        return tuple(sorted(found, key=lambda axis: axis != max(found, key=counts.__getitem__)))

    def where(self, kept: NDArray[np.bool_]) -> Self:
        """Select sizes by a mask."""
        return type(self)(self.axes, self.points[kept], self.works[kept], self.seconds[kept])

    def along(self, axes: Sequence[str]) -> list[Array]:
        """Values `[S]` along each of some axes, or of "work"."""
        named = dict(zip(self.axes, self.points.T.astype(np.float64), strict=True), work=self.works)
        return [named[axis] for axis in axes]


def folds(sizes: Sizes, curve: str | None = None) -> list[NDArray[np.bool_]]:
    """Sizes to hold out, `[S]` in each of F folds; no size is in two.

    Notes
    -----
    Along one axis: every second size inside the range, first the odd, then the even ones; the ends are never held out.
    Along several: the sizes that differ only along the curve's axis (all m of an (n, k)) are one group and are held out
    together, the groups in five folds drawn at random with a fixed seed. Of fewer than five groups: every second size
    by work, as along one axis. Of up to five curves along `curve`: every second size of each.
    """
    first, groups = distinct([np.zeros(len(sizes.works)), *sizes.along(sizes.varying[1:])])
    num_groups = len(first)
    if num_groups >= NUM_FOLDS + (curve is not None):  # of five curves one alone may vary an axis
        fold_of_group = np.random.default_rng(SEED).permutation(num_groups) % NUM_FOLDS
        return [fold_of_group[groups] == fold for fold in range(NUM_FOLDS)]
    place = np.unique(sizes.works, return_inverse=True)[1]
    last = np.full(len(place), place.max())
    if curve in sizes.varying:
        for group in range(num_groups):
            place[groups == group] = np.argsort(np.argsort(sizes.works[groups == group]))
            last[groups == group] = (groups == group).sum() - 1
    inside = (place > 0) & (place < last)
    found = [inside & (place % 2 == parity) for parity in (1, 0)]
    return [held for held in found if held.any()]


def distinct(columns: Sequence[NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct rows of columns `[R]` in lexical order: where each is first, `[S]`, and which one a row is, `[R]`.

    Notes
    -----
    Rows are numbered column by column, by sorting integers: ten times as fast as `np.unique` along an axis.
    """
    place = np.zeros(len(columns[0]), dtype=np.int64)
    first = np.zeros(1, dtype=np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        _, first, place = np.unique(place * len(values) + code, return_index=True, return_inverse=True)
    return first, place
