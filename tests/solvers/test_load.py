import numpy as np
import pytest

from moeplan.solvers.load import max_over_mean


def test_the_largest_over_the_mean_is_taken_along_the_axis_and_idle_rows_are_what_is_said() -> None:
    loads = np.array([[[1.0, 3.0], [0.0, 0.0]], [[2.0, 2.0], [6.0, 0.0]]])
    assert max_over_mean(loads).tolist() == [[1.5, 1.0], [1.0, 2.0]]
    assert max_over_mean(loads, idle=0.0).tolist() == [[1.5, 0.0], [1.0, 2.0]]
    assert max_over_mean(loads, axis=0) == pytest.approx(np.array([[4 / 3, 6 / 5], [2, 1]]))
