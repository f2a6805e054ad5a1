"""The attention model finds the law its times were made by."""

import itertools

import numpy as np
import pytest

from moeplan.errors import InputError
from moeplan.profilers.fits.laws import AttentionLaw

GRID = np.array(list(itertools.product((1, 4, 16), (64, 512, 4096), (256, 1024))), dtype=np.float64).T


def test_the_coefficients_come_back() -> None:
    batch, length, hidden = GRID
    law = AttentionLaw(start_s=2e-5, projection_s=3e-14, score_s=5e-14)
    seconds = [2e-5 + (3e-14 * m + 5e-14 * tokens) * sequences * tokens * m for sequences, tokens, m in GRID.T]
    assert law.seconds(batch, length, hidden) == pytest.approx(seconds)
    found = AttentionLaw.of(batch, length, hidden, t=np.array(seconds))
    assert (found.start_s, found.projection_s, found.score_s) == pytest.approx((2e-5, 3e-14, 5e-14))


def test_no_coefficient_is_negative_where_times_fall() -> None:
    batch, length, hidden = GRID
    found = AttentionLaw.of(batch, length, hidden, t=1 / (batch * length * hidden))
    assert min(found.start_s, found.projection_s, found.score_s) >= 0


@pytest.mark.parametrize("values", [(-1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (float("nan"), 1.0, 1.0)])
def test_impossible_coefficients_are_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="attention"):
        AttentionLaw(start_s=values[0], projection_s=values[1], score_s=values[2])
