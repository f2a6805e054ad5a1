"""The seconds of pipelined passes: in equal and unequal chunks, of measured curves and of uncertain ones."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import measured_degrees, nested_pairs, optimal_degree, robust_choice, unequal_chunks
from moeplan.solvers.pipemoe.seconds import Stage, chunk_seconds, layer_seconds, simulate
from tests.builders import known
from tests.solvers.builders import Array, simulated

stage_s = st.floats(0, 10)


@settings(max_examples=150)
@given(st.integers(1, 12), stage_s, stage_s, stage_s, st.booleans())
def test_equal_chunks_take_what_the_formula_says(r: int, t_d: float, t_e: float, t_c: float, full_duplex: bool) -> None:
    expected = simulated([t_d] * r, [t_e] * r, [t_c] * r, full_duplex)
    dispatch_s, experts_s, combine_s = np.array([[t_d], [t_e], [t_c]])
    found = layer_seconds(np.array([r]), dispatch_s, experts_s, combine_s, full_duplex=full_duplex)
    assert found[0] == pytest.approx(expected)


@settings(max_examples=150)
@given(st.lists(st.tuples(stage_s, stage_s, stage_s), min_size=1, max_size=9), st.booleans())
def test_any_schedule_ends_as_the_event_simulation(chunks: list[tuple[float, float, float]], full_duplex: bool) -> None:
    dispatch_s, experts_s, combine_s = stages = [list(stage) for stage in zip(*chunks, strict=True)]
    events = simulate(dispatch_s, experts_s, combine_s, full_duplex=full_duplex)
    assert events[-1].end_s == pytest.approx(simulated(dispatch_s, experts_s, combine_s, full_duplex))
    for stage, durations in zip(Stage, stages, strict=True):
        own = [event for event in events if event.stage is stage]
        assert [event.chunk for event in own] == list(range(len(chunks)))
        assert [event.end_s - event.start_s for event in own] == pytest.approx(durations)
        assert all(later.start_s >= earlier.end_s for earlier, later in itertools.pairwise(own))
    if not full_duplex:
        last_dispatch = max(event.end_s for event in events if event.stage is Stage.DISPATCH)
        assert all(event.start_s >= last_dispatch for event in events if event.stage is Stage.COMBINE)


@given(st.lists(st.tuples(stage_s, stage_s, stage_s), min_size=1, max_size=9), st.booleans(), st.integers(0, 3))
def test_unequal_chunks_take_what_events_say(
    chunks: list[tuple[float, float, float]], full_duplex: bool, missing: int
) -> None:
    dispatch_s, experts_s, combine_s = stages = [list(stage) for stage in zip(*chunks, strict=True)]
    others = [[2 * seconds for seconds in stage[:1]] + [0.0] * (len(stage) - 1) for stage in stages]  # of one chunk
    tables = [
        np.array([*zip(*pair, strict=True), *[(0.0, 0.0)] * missing]) for pair in zip(stages, others, strict=True)
    ]
    found = chunk_seconds(*tables, full_duplex=full_duplex)
    assert found[0] == pytest.approx(simulated(dispatch_s, experts_s, combine_s, full_duplex))
    assert found[1] == pytest.approx(simulated(others[0][:1], others[1][:1], others[2][:1], full_duplex))


@pytest.mark.parametrize("stages", [([], [], []), ([1.0], [1.0], [1.0, 1.0])])
def test_stages_that_do_not_fit_together_are_refused(stages: tuple[list[float], list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="chunks"):
        simulate(*stages)


starts = st.floats(-4, -1.5).map(lambda x: 10**x)
works = st.floats(-1, 0.5).map(lambda x: 10**x)


def seconds(layer: dict[str, Any], shares: Sequence[float], full_duplex: bool) -> float:
    share = np.array(shares)
    t_d, t_e = layer["a_a"] + layer["b_a"] * share, layer["a_e"] + layer["b_e"] * share
    return simulated(t_d.tolist(), t_e.tolist(), t_d.tolist(), full_duplex)


@settings(max_examples=25)
@given(starts, starts, works, works, st.booleans(), st.integers(0, 99))
def test_unequal_chunks_take_what_the_simulation_says_and_no_others_are_faster(
    a_a: float, a_e: float, d: float, e: float, full_duplex: bool, seed: int
) -> None:
    layer: dict[str, Any] = {"a_a": a_a, "b_a": d, "a_e": a_e, "b_e": e}
    found = unequal_chunks(**layer, n_d=1, n_e=1, max_degree=6, full_duplex=full_duplex)
    value = found.outcome.objective.value
    equal = optimal_degree(**layer, n_d=1, n_e=1, backward=0, max_degree=6, full_duplex=full_duplex)
    assert sum(found.shares) == pytest.approx(1)
    assert seconds(layer, found.shares, full_duplex) == pytest.approx(value, rel=1e-6)
    assert value <= found.equal_s == equal.forward_s
    assert found.outcome.status is Status.OPTIMAL
    rng = np.random.default_rng(seed)
    for r in rng.integers(1, 7, 20).tolist():
        others = [rng.dirichlet(np.ones(r)), np.abs(rng.normal(np.resize(found.shares, r), 0.02))]
        for shares in others:
            assert seconds(layer, (shares / shares.sum()).tolist(), full_duplex) >= value * (1 - 1e-7)


def test_they_help_where_the_experts_saturate_and_not_where_the_network_does() -> None:
    layer: dict[str, Any] = {"a_a": 0.02, "b_a": 1.0, "a_e": 0.02}
    slow_experts = unequal_chunks(**layer, b_e=2.5, n_d=1, n_e=1)
    assert slow_experts.outcome.objective.value < 0.95 * slow_experts.equal_s
    assert slow_experts.shares[0] == min(slow_experts.shares[:3])
    slow_network = unequal_chunks(**layer, b_e=0.5, n_d=1, n_e=1)
    assert slow_network.outcome.objective.value == slow_network.equal_s
    assert slow_network.shares == (0.5, 0.5)


def test_optimal_only_where_no_further_chunk_could_help() -> None:
    layer: dict[str, Any] = {"a_a": 1e-6, "b_a": 1.0, "b_e": 2.5, "n_d": 1, "n_e": 1}
    free, slow = unequal_chunks(**layer, a_e=1e-6).outcome, unequal_chunks(**layer, a_e=0.05).outcome
    assert free.status is Status.FEASIBLE
    assert free.bound == pytest.approx(2e-6 + 17e-6 + 2.5)
    assert known(free.bound) < free.objective.value
    assert slow.status is Status.OPTIMAL
    assert unequal_chunks(**layer, a_e=1e-6, max_degree=4).outcome.status is Status.OPTIMAL


positive = st.floats(-5, -1).map(lambda x: 10**x)


@settings(max_examples=60)
@given(positive, positive, positive, positive, st.booleans())
def test_lines_as_curves_give_the_closed_form(a_a: float, a_e: float, d: float, e: float, full_duplex: bool) -> None:
    curves: dict[str, Any] = {"dispatch": lambda n: a_a + d * n, "experts": lambda n: a_e + e * n}
    curves["full_duplex"] = full_duplex
    exact = optimal_degree(a_a=a_a, b_a=d, a_e=a_e, b_e=e, n_d=3, n_e=5, max_degree=64, full_duplex=full_duplex)
    found = measured_degrees(**curves, n_d=3, n_e=5)
    assert found.joint_s.tolist() == pytest.approx([exact.joint_s], rel=1e-12)
    assert exact.outcome.objective.value * (1 - 1e-12) <= found.outcome.objective.value <= found.joint_s[0]
    forward = measured_degrees(**curves, n_d=3, n_e=5, backward=0)
    assert forward.outcome.objective.value == pytest.approx(exact.forward_s, rel=1e-12)


@settings(max_examples=40)
@given(
    st.lists(positive, min_size=4, max_size=4),
    st.lists(positive, min_size=4, max_size=4),
    st.sampled_from([None, 1, 7, 100]),
    st.booleans(),
)
def test_any_monotone_curves_give_the_best_simulated_schedule(
    dispatch: list[float], experts: list[float], capacity: int | None, full_duplex: bool
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


tables = st.integers(1, 5).flatmap(
    lambda degrees: st.lists(st.lists(st.floats(0, 10), min_size=degrees, max_size=degrees), min_size=1, max_size=9)
)


@given(tables)
def test_the_degree_has_the_smallest_largest_regret_of_a_walk_over_scenarios(table: list[list[float]]) -> None:
    found = robust_choice(table)
    regrets = [max(row[r] - min(row) for row in table) for r in range(len(table[0]))]
    assert found.regret_s.tolist() == regrets
    assert found.choice == regrets.index(min(regrets))
    assert found.outcome.objective.value == min(regrets)
    assert found.outcome.status is Status.OPTIMAL


@pytest.mark.parametrize("wrong", [[], [[]], [1.0, 2.0], [[-1.0]], [[np.nan]], [[np.inf, 1.0]]])
def test_tables_that_are_no_tables_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        robust_choice(wrong)
