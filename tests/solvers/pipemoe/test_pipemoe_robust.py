import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from moeplan.solvers.pipemoe import optimal_degree, robust_degree

Array = NDArray[Any]
MOST = 4
factors = st.floats(0, 1.5).map(lambda x: 10**x)
levels = st.floats(-2, 0).map(lambda x: 10**x)
boxes = st.lists(st.tuples(levels, factors), min_size=4, max_size=4)


def pass_arms(r: int, factor: float, full_duplex: bool) -> list[Array]:
    left = [r + 1, 1 + 1 / r, factor, factor / r] if full_duplex else [2 * r, 2, 0, 0]
    return [np.array(left, dtype=float), np.array([2, 2 / r, factor * r, factor])]


def regret_by_linear_programmes(r: int, box: Array, passes: tuple[float, ...], full_duplex: bool) -> float:
    """The largest over rivals and arms of max_c X . c - sum_p u_p with u_p >= both arms of pass p of the rival."""
    worst = 0.0
    for s in range(1, MOST + 1):
        for chosen in itertools.product(*(pass_arms(r, factor, full_duplex) for factor in passes)):
            rows = []
            for p, factor in enumerate(passes):
                rows += [np.append(arm, -np.eye(len(passes))[p]) for arm in pass_arms(s, factor, full_duplex)]
            value = np.append(-np.sum(chosen, axis=0), np.ones(len(passes)))
            bounds = [*map(tuple, box), *[(None, None)] * len(passes)]
            worst = max(worst, -linprog(value, A_ub=rows, b_ub=np.zeros(len(rows)), bounds=bounds).fun)
    return worst


def check_against_linear_programmes(box: Array, passes: tuple[float, ...], full_duplex: bool) -> None:
    names: dict[str, Any] = dict(zip(("a_a", "b_a", "a_e", "b_e"), map(tuple, box.tolist()), strict=True))
    found = robust_degree(**names, n_d=1, n_e=1, passes=passes, max_degree=MOST, full_duplex=full_duplex)
    expected = [regret_by_linear_programmes(r, box, passes, full_duplex) for r in range(1, MOST + 1)]
    assert found.regret_s == pytest.approx(expected, rel=1e-7, abs=1e-7)
    assert found.outcome.objective.value == found.regret_s[found.degree - 1] == found.regret_s.min()


@settings(max_examples=10, deadline=None)
@given(boxes, st.sampled_from([(1.0,), (2.0,), (1.0, 2.0)]), st.booleans())
def test_every_regret_is_that_of_the_linear_programmes(
    known: list[tuple[float, float]], passes: tuple[float, ...], full_duplex: bool
) -> None:
    check_against_linear_programmes(np.array([(low, low * factor) for low, factor in known]), passes, full_duplex)


@pytest.mark.parametrize("passes", [(1.0,), (1.0, 2.0)])
@pytest.mark.parametrize("full_duplex", [False, True])
def test_wide_boxes_whose_worst_constants_are_no_corner_are_no_exception(
    passes: tuple[float, ...], full_duplex: bool, rng: np.random.Generator
) -> None:
    for _ in range(6):
        low = 10 ** rng.uniform(-2, 0, 4)
        check_against_linear_programmes(
            np.stack([low, low * 10 ** rng.uniform(0.5, 1.5, 4)], axis=1), passes, full_duplex
        )


def test_known_constants_leave_the_optimal_degree_no_regret() -> None:
    layer: dict[str, Any] = {"a_a": 1e-4, "b_a": 3e-10, "a_e": 1.2e-4, "b_e": 3.3e-13}
    box: dict[str, Any] = {name: (value, value) for name, value in layer.items()}
    exact = optimal_degree(**layer, n_d=1e8, n_e=1e11, max_degree=32)
    for passes, degree in (((1.0,), exact.forward), ((2.0,), exact.backward), ((1.0, 2.0), exact.joint)):
        found = robust_degree(**box, n_d=1e8, n_e=1e11, passes=passes)
        assert found.degree == degree
        assert found.outcome.objective.value == pytest.approx(0, abs=1e-15)


def test_the_robust_degree_is_never_more_wrong_than_the_one_for_the_middle_of_the_box() -> None:
    middle: dict[str, Any] = {"a_a": 3e-4, "b_a": 3e-10, "a_e": 1.2e-4, "b_e": 3.3e-13}
    box: dict[str, Any] = {name: (value * 0.5, value * 2) for name, value in middle.items()}
    found = robust_degree(**box, n_d=1e8, n_e=1e11)
    plain = optimal_degree(**middle, n_d=1e8, n_e=1e11)
    assert found.outcome.objective.value < found.regret_s[plain.joint - 1]


@pytest.mark.parametrize(
    "wrong", [{"a_a": (2.0, 1.0)}, {"b_a": (-1.0, 1.0)}, {"b_e": (0.0, np.inf)}, {"passes": ()}, {"max_degree": 0}]
)
def test_boxes_that_are_no_boxes_are_refused(wrong: dict[str, Any]) -> None:
    box: dict[str, Any] = dict.fromkeys(("a_a", "b_a", "a_e", "b_e"), (0.0, 1.0)) | wrong
    with pytest.raises(ValueError, match="expected"):
        robust_degree(**box, n_d=1, n_e=1)
