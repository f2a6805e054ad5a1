"""Predicting: from a profile, the seconds of a case at any size."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UsageError
from .cases.works import work_of
from .fits.fit import Prediction
from .profile import Profile
from .series import LinkKind, Series

ANY_BYTES = "uint8"


def predict(
    profile: Profile,
    case: str,
    size: Mapping[str, ArrayLike],
    *,
    dtype: str | None = None,
    ranks: int | None = None,
    link: LinkKind | None = None,
) -> Prediction:
    """The seconds of one call at one or many sizes.

    Parameters
    ----------
    case, size
        "gemm" and {"m": 64, "n": [2048, 4096], "k": 7168}: scalars and arrays that broadcast.
    dtype, ranks, link
        Which series; None where the profile has only one to choose from. A series over bytes that was measured in
        "uint8" answers for any dtype. Where no series has so many ranks, the nearest number measured answers (in
        ratio, the larger of equals) for its own work, and all is flagged as extrapolated.

    Raises
    ------
    UsageError
        There is no such series, or there are several; the message names what there is.
    """
    candidates = [series for series in profile.series.values() if series.case == case and series.fit]
    if not candidates:
        cases = sorted({series.case for series in profile.series.values() if series.fit})
        raise UsageError(f"the profile has no fit of {case}; it has {', '.join(cases) or 'none at all'}")
    candidates = _matching(candidates, "link", link)
    candidates = _matching(candidates, "dtype", _dtype(candidates, dtype))
    near = None if ranks is None else _nearest(ranks, sorted({series.ranks for series in candidates}))
    (series,) = _matching(candidates, "ranks", near)
    prediction = predicted(series, size)
    if ranks in (None, series.ranks):
        return prediction
    return replace(prediction, extrapolated=np.ones_like(prediction.extrapolated))


def predicted(series: Series, size: Mapping[str, ArrayLike]) -> Prediction:
    """The seconds of one call of a fitted series at one or many sizes, scalars and arrays that broadcast.

    Raises
    ------
    UsageError
        The series has no fit, or the size lacks an axis or has another.
    """
    if series.fit is None:
        raise UsageError(f"the series {series.key} has no fit; expected at least two sizes measured")
    series.fit.check_axes(size)
    columns = {axis: np.asarray(column) for axis, column in size.items()}
    return series.fit.predict(size, work_of(series.case, columns, series.ranks))


def _matching(candidates: Sequence[Series], name: str, wanted: object) -> list[Series]:
    """The series with this attribute; where none is wanted, all, which must then be alike in it."""
    values = sorted({getattr(series, name) for series in candidates}, key=str)
    choices = f"{candidates[0].case} is there in {name} {', '.join(map(str, values))}"
    if wanted is None:
        if len(values) > 1:
            raise UsageError(f"{choices}; name one")
        return list(candidates)
    if wanted not in values:
        raise UsageError(f"no {name} {wanted}: {choices}")
    return [series for series in candidates if getattr(series, name) == wanted]


def _dtype(candidates: Sequence[Series], dtype: str | None) -> str | None:
    values = {series.dtype for series in candidates}
    moved = any(series.unit == "bytes" and series.dtype == ANY_BYTES for series in candidates)
    return ANY_BYTES if dtype is not None and dtype not in values and moved else dtype


def _nearest(ranks: int, values: Sequence[int]) -> int:
    if ranks < 1:
        raise UsageError(f"{ranks} ranks; expected at least 1")
    return min(values, key=lambda one: (abs(np.log(one / ranks)), -one))
