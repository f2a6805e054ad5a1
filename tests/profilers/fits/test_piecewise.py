"""The monotone curve against isotonic regression by brute force, and its shape between and beyond knots."""

import itertools
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError
from moeplan.profilers.fits.piecewise import Piecewise

Kind = Literal["piecewise", "piecewise_linear"]
KINDS = pytest.mark.parametrize("kind", ["piecewise", "piecewise_linear"])
POINTS = st.lists(st.tuples(st.integers(1, 2**40), st.floats(1e-7, 1e2)), min_size=2, max_size=20).filter(
    lambda points: len({n for n, _ in points}) > 1
)


@KINDS
@given(points=POINTS, asked=st.lists(st.floats(1, 2**42), min_size=2, max_size=20))
def test_no_size_takes_less_than_a_smaller_one(kind: Kind, points: list[tuple[int, float]], asked: list[float]) -> None:
    n, t = np.array(points, dtype=np.float64).T
    model = Piecewise.of(n, t, kind)
    found = model.seconds(np.sort(np.array(asked + n.tolist())))
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-9 * found[1:]).all()


@settings(max_examples=40)
@given(values=st.lists(st.integers(1, 5), min_size=2, max_size=5))
def test_knots_are_the_never_falling_values_of_least_absolute_distance(values: list[int]) -> None:
    n, t = np.arange(1.0, len(values) + 1), np.array(values, dtype=np.float64)
    model = Piecewise.of(n, t)
    rising = itertools.combinations_with_replacement(range(1, 6), len(values))
    best = min(sum(abs(one - value) for one, value in zip(row, values, strict=True)) for row in rising)
    assert np.abs(np.array(model.seconds_at) - t).sum() == pytest.approx(best)


def test_a_lone_slow_size_is_outvoted() -> None:
    model = Piecewise.of(np.arange(1.0, 7), np.array([1.0, 1.0, 9.0, 1.0, 1.0, 2.0]))
    assert model.seconds_at == (1.0, 1.0, 1.0, 1.0, 1.0, 2.0)


def test_one_kind_is_straight_in_the_logs_and_the_other_in_the_numbers() -> None:
    n, t = np.array([1.0, 4.0, 16.0]), np.array([1.0, 8.0, 64.0])
    asked = np.array([2.0, 8.0])
    assert Piecewise.of(n, t, "piecewise").seconds(asked) == pytest.approx(asked**1.5)
    assert Piecewise.of(n, t, "piecewise_linear").seconds(asked) == pytest.approx([1 + 7 / 3, 8 + 56 / 3])


@KINDS
def test_it_is_constant_below_and_keeps_the_last_slope_beyond(kind: Kind) -> None:
    n = np.array([10.0, 100.0, 1000.0])
    model = Piecewise.of(n, n * 1e-6, kind)
    assert model.seconds(np.array([0.0, 1.0, 10.0])) == pytest.approx(1e-5)
    assert model.seconds(np.array([1e5])) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("works", "seconds"),
    [
        ((1.0,), (1.0,)),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((1.0, 2.0), (1.0,)),
        ((0.0, 1.0), (1.0, 1.0)),
    ],
)
def test_impossible_knots_are_refused(works: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="piecewise"):
        Piecewise(works=works, seconds_at=seconds)


def test_a_steep_last_step_is_continued_in_proportion_to_work() -> None:
    model = Piecewise.of(np.array([88.0, 89.0]), np.array([1.0, 88.0]))
    assert model.seconds(np.array([8900.0])) == pytest.approx(8800)
