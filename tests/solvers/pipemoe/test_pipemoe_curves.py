from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeplan.solvers.pipemoe import measured_degrees, nested_pairs, optimal_degree

Array = NDArray[Any]
Simulated = Callable[[Sequence[float], Sequence[float], Sequence[float], bool], float]
positive = st.floats(-5, -1).map(lambda x: 10**x)


@settings(max_examples=60, deadline=None)
@given(positive, positive, positive, positive, st.booleans())
def test_lines_as_curves_give_the_degrees_of_the_closed_form(
    a_a: float, a_e: float, d: float, e: float, full_duplex: bool
) -> None:
    curves: dict[str, Any] = {"dispatch": lambda n: a_a + d * n, "experts": lambda n: a_e + e * n}
    curves["full_duplex"] = full_duplex
    exact = optimal_degree(a_a=a_a, b_a=d, a_e=a_e, b_e=e, n_d=3, n_e=5, max_degree=64, full_duplex=full_duplex)
    found = measured_degrees(**curves, n_d=3, n_e=5)
    assert found.joint_s.tolist() == pytest.approx([exact.joint_s], rel=1e-12)
    assert exact.outcome.objective.value * (1 - 1e-12) <= found.outcome.objective.value <= found.joint_s[0]
    forward = measured_degrees(**curves, n_d=3, n_e=5, backward=0)
    assert forward.outcome.objective.value == pytest.approx(exact.forward_s, rel=1e-12)


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

    def taken(r: int, pieces: int, factor: int) -> float:
        share = -(-capacity // pieces) / capacity if capacity else 1 / pieces  # padded to whole pieces
        n = np.array(pieces / r * 100 * share)
        there, back = float(curve(dispatch, n)), float(curve(dispatch, n / 2))
        first, last = (there, back) if factor == 1 else (back, there)
        call = factor * float(curve(experts, np.array(100 * share)))
        return simulated([first] * r, [pieces // r * call] * r, [last] * r, full_duplex)

    allowed = range(1, min(12, capacity or 12) + 1)
    passes = {
        (f, b): (taken(f, max(f, b), 1), taken(b, max(f, b), 2))
        for f in allowed
        for b in allowed
        if not (f % b and b % f)
    }
    least = min(map(sum, passes.values()))
    chosen = passes[int(found.forward[0]), int(found.backward[0])]
    assert [found.forward_s[0], found.backward_s[0]] == pytest.approx(chosen)
    assert found.outcome.objective.value == pytest.approx(least)
    assert found.joint_s[0] == pytest.approx(min(sum(passes[r, r]) for r in allowed))
    assert sum(passes[(int(found.joint[0]),) * 2]) == pytest.approx(found.joint_s[0])


def test_calls_of_experts_count_where_passes_cut_each_others_chunks() -> None:
    """Alone the passes want 2 and 10 chunks; the calls that 10 cost the other pass are worth one less of them."""
    apart = optimal_degree(a_a=0.01, b_a=1.0, a_e=0.01, b_e=1.0, n_d=1.0, n_e=1.0)
    found = measured_degrees(lambda n: 0.01 + n, lambda n: 0.01 + n, n_d=1.0, n_e=1.0)
    assert (apart.forward, apart.backward) == (2, 10)
    assert (found.forward.tolist(), found.backward.tolist()) == ([3], [9])
    assert apart.outcome.objective.value < found.outcome.objective.value < found.joint_s[0]


def test_padding_moves_the_degree_to_one_that_divides_the_capacity() -> None:
    layer: dict[str, Any] = {"n_d": 1.0, "n_e": 1.0, "backward": 0, "max_degree": 32}
    line: dict[str, Any] = {"dispatch": lambda n: 0.01 + n, "experts": lambda n: 0.01 + 1.2 * n}
    free = measured_degrees(**line, **layer)
    padded = measured_degrees(**line, **layer, capacity=8)
    assert (free.forward[0], padded.forward[0]) == (3, 4)
    assert padded.forward_s[0] > free.forward_s[0]


def test_without_a_backward_pass_its_degree_is_one() -> None:
    found = measured_degrees(lambda n: 0.01 + n, lambda n: 0.01 + n, n_d=[1.0, 2.0], n_e=1.0, backward=0)
    assert found.backward.tolist() == [1, 1]
    assert found.backward_s.tolist() == [0, 0]
    assert (found.joint == found.forward).all()


def test_without_a_backward_pass_no_chunk_is_computed_in_several_calls() -> None:
    """Experts of 0.1 n^2 would gain by them."""
    found = measured_degrees(lambda n: 1 + n, lambda n: 0.1 * n**2, n_d=1.0, n_e=1.0, backward=0, max_degree=8)
    assert found.forward.tolist() == [1]
    assert found.outcome.objective.value == pytest.approx(4.1)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_curves_of_no_seconds_are_refused(wrong: float) -> None:
    for curves in ((lambda n: n + wrong, lambda n: n), (lambda n: n, lambda n: n + wrong)):
        with pytest.raises(ValueError, match="expected"):
            measured_degrees(*curves, n_d=1, n_e=1)


@pytest.mark.parametrize("limits", [{"max_degree": 0}, {"capacity": 0}])
def test_limits_below_one_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measured_degrees(lambda n: n, lambda n: n, n_d=1, n_e=1, **limits)


@pytest.mark.parametrize("most", [1, 2, 7, 12])
def test_pairs_are_those_of_which_one_divides_the_other_fewest_pieces_first(most: int) -> None:
    found = [(there, back) for there, back in nested_pairs(most).tolist()]
    expected = {(f, b) for f in range(1, most + 1) for b in range(1, most + 1) if not (f % b and b % f)}
    assert len(found) == len(expected)
    assert {*found} == expected
    assert found == sorted(found, key=lambda pair: (max(pair), sum(pair)))
    assert found[0] == (1, 1)
