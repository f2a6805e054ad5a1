from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.solvers.pipemoe import measured_degrees, optimal_degree, tabulated_degrees

Array = NDArray[Any]
Simulated = Callable[[Sequence[float], Sequence[float], Sequence[float], bool], float]
positive = st.floats(-5, -1).map(lambda x: 10**x)


@settings(max_examples=60, deadline=None)
@given(positive, positive, positive, positive, st.booleans())
def test_lines_as_curves_give_the_degrees_of_the_closed_form(
    a_a: float, a_e: float, d: float, e: float, full_duplex: bool
) -> None:
    exact = optimal_degree(a_a=a_a, b_a=d, a_e=a_e, b_e=e, n_d=3, n_e=5, max_degree=64, full_duplex=full_duplex)
    found = measured_degrees(lambda n: a_a + d * n, lambda n: a_e + e * n, n_d=3, n_e=5, full_duplex=full_duplex)
    assert found.outcome.objective.value == pytest.approx(exact.outcome.objective.value, rel=1e-12)
    assert found.joint_s.tolist() == pytest.approx([exact.joint_s], rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(positive, min_size=4, max_size=4),
    st.lists(positive, min_size=4, max_size=4),
    st.sampled_from([None, 1, 7, 100]),
    st.booleans(),
)
def test_any_monotone_curves_give_the_best_simulated_schedule(
    simulated: Simulated, dispatch: list[float], experts: list[float], capacity: int | None, full_duplex: bool
) -> None:
    knots = [0.0, 1.0, 10.0, 100.0]

    def curve(steps: list[float], n: Array) -> Array:
        return np.asarray(np.interp(n, knots, np.cumsum(steps)))

    found = measured_degrees(
        lambda n: curve(dispatch, n),
        lambda n: curve(experts, n),
        combine=lambda n: curve(dispatch, n / 2),
        n_d=100,
        n_e=100,
        max_degree=12,
        capacity=capacity,
        full_duplex=full_duplex,
    )
    tables = []
    for factor in (1, 2):
        table = []
        for r in range(1, min(12, capacity or 12) + 1):
            tokens = -(-(capacity or r) // r) * r  # padded to a multiple of r
            n = np.array(100 * tokens / (capacity or r) / r)
            there, back = float(curve(dispatch, n)), float(curve(dispatch, n / 2))
            first, last = (there, back) if factor == 1 else (back, there)
            table.append(simulated([first] * r, [factor * float(curve(experts, n))] * r, [last] * r, full_duplex))
        tables.append(np.array(table))
    both = tables[0] + tables[1]
    least = [table.min() for table in (*tables, both)]
    assert [found.forward_s[0], found.backward_s[0], found.joint_s[0]] == pytest.approx(least)
    taken = [
        table[one[0] - 1]
        for table, one in zip((*tables, both), (found.forward, found.backward, found.joint), strict=True)
    ]
    assert taken == pytest.approx(least)


def test_padding_moves_the_degree_to_one_that_divides_the_capacity() -> None:
    layer: dict[str, Any] = {"n_d": 1.0, "n_e": 1.0, "backward": 0, "max_degree": 32}
    line: dict[str, Any] = {"dispatch": lambda n: 0.01 + n, "experts": lambda n: 0.01 + 1.2 * n}
    free = measured_degrees(**line, **layer)
    padded = measured_degrees(**line, **layer, capacity=8)
    assert (free.forward[0], padded.forward[0]) == (3, 4)
    assert padded.forward_s[0] > free.forward_s[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(1, 6), st.integers(1, 4))
def test_of_a_table_every_layer_gets_the_first_of_its_fastest_degrees(seed: int, degrees: int, layers: int) -> None:
    there, back = np.random.default_rng(seed).integers(0, 4, (2, degrees, layers)).astype(float)
    found = tabulated_degrees(there, back)
    for layer in range(layers):
        columns = [[float(x) for x in table[:, layer]] for table in (there, back, there + back)]
        firsts = [column.index(min(column)) + 1 for column in columns]
        assert [one[layer] for one in (found.forward, found.backward, found.joint)] == firsts
        seconds = [one[layer] for one in (found.forward_s, found.backward_s, found.joint_s)]
        assert seconds == [min(column) for column in columns]
    assert found.outcome.objective.value == (found.forward_s + found.backward_s).sum()


def test_without_a_backward_pass_its_degree_is_one() -> None:
    found = measured_degrees(lambda n: 0.01 + n, lambda n: 0.01 + n, n_d=[1.0, 2.0], n_e=1.0, backward=0)
    assert found.backward.tolist() == [1, 1]
    assert found.backward_s.tolist() == [0, 0]
    assert (found.joint == found.forward).all()


@pytest.mark.parametrize("wrong", [[], [1.0], [[]], [[-1.0]], [[np.nan]], [[np.inf]], [[1.0], [1.0]]])
def test_tables_that_are_no_tables_are_refused(wrong: Any) -> None:
    for passes in ((wrong, [[1.0]]), ([[1.0]], wrong)):
        with pytest.raises(ValueError, match="expected"):
            tabulated_degrees(*passes)


@pytest.mark.parametrize("limits", [{"max_degree": 0}, {"capacity": 0}])
def test_limits_below_one_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measured_degrees(lambda n: n, lambda n: n, n_d=1, n_e=1, **limits)
