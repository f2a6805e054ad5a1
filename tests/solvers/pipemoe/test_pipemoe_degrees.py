"""The degrees of pipelined layers and the seconds of their passes: closed forms, chunks, curves, regrets."""

import itertools
import timeit
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipemoe_presets import PRESETS, Preset, table_iv
from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import (
    TUTEL_MAX_DEGREE,
    measured_degrees,
    nested_pairs,
    optimal_degree,
    optimal_degrees,
    robust_choice,
    unequal_chunks,
)
from moeplan.solvers.pipemoe.seconds import Stage, chunk_seconds, layer_seconds, simulate
from tests.builders import known
from tests.solvers.builders import Array, pass_seconds, simulated

start_s = st.floats(-7, -2).map(lambda x: 10**x)  # to start
work_s = st.floats(-6, -0.3).map(lambda x: 10**x)


def constants(preset: Preset) -> dict[str, Any]:
    return {"a_a": preset.a_a, "b_a": preset.b_a, "a_e": preset.a_e, "b_e": preset.b_e}


@settings(max_examples=200)
@given(
    st.fixed_dictionaries({"a_a": start_s, "b_a": work_s, "a_e": start_s, "b_e": work_s}),
    st.sampled_from([0.0, 0.5, 2.0, 3.0]),
    st.sampled_from([None, 1, 3, TUTEL_MAX_DEGREE]),
    st.booleans(),
)
def test_any_layer_takes_as_long_as_with_the_best_of_4000_degrees_within_the_limit(
    layer: dict[str, Any], backward: float, limit: int | None, full_duplex: bool
) -> None:
    options: dict[str, Any] = {"backward": backward, "max_degree": limit, "full_duplex": full_duplex}
    found = optimal_degree(**layer, n_d=1, n_e=1, **options)
    there, back = (pass_seconds(layer, 1, 1, factor, full_duplex)[:limit] for factor in (1.0, backward))
    back *= backward > 0
    assert found.forward_s == pytest.approx(there.min(), rel=1e-12)
    assert found.backward_s == pytest.approx(back.min(), rel=1e-12)
    assert found.joint_s == pytest.approx((there + back).min(), rel=1e-12)
    taken = there[found.forward - 1], back[found.backward - 1], (there + back)[found.joint - 1]
    assert taken == pytest.approx((found.forward_s, found.backward_s, found.joint_s), rel=1e-12)
    assert found.outcome.objective.value == pytest.approx(found.forward_s + found.backward_s, rel=1e-12)
    assert (found.outcome.status, found.outcome.gap) == (Status.OPTIMAL, 0)
    assert (np.diff(there, 2) >= -1e-12 * there[1:-1]).all()  # convex
    many = optimal_degrees(**layer, n_d=[1], n_e=1, **options)
    assert [column[0] for column in astuple(many)[:6]] == list(astuple(found)[:6])


def test_equal_degrees_go_to_the_smallest() -> None:
    free_start: dict[str, Any] = {"a_a": 0.0, "b_a": 1.0, "a_e": 0.0, "b_e": 0.5, "n_d": 1.0, "n_e": 1.0}
    assert optimal_degree(**free_start, max_degree=64, backward=0).forward == 2  # 2 d from r = 2 on
    assert optimal_degree(a_a=1, b_a=0, a_e=0, b_e=1, n_d=1, n_e=1).joint == 1


@pytest.mark.parametrize(
    "wrong",
    [{"a_a": -1e-6}, {"b_e": np.nan}, {"n_d": np.inf}, {"backward": -1}, {"max_degree": 0}, {"a_a": 0, "a_e": 0}],
)
def test_absurd_numbers_are_refused(wrong: dict[str, Any]) -> None:
    known: dict[str, Any] = {"a_a": 1e-5, "b_a": 1e-10, "a_e": 1e-5, "b_e": 1e-13, "n_d": 1e8, "n_e": 1e11} | wrong
    with pytest.raises(ValueError, match=r"expected|max_degree"):
        optimal_degree(**known)
    with pytest.raises(ValueError, match=r"expected|max_degree"):
        optimal_degrees(**known)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="exact or paper"):
        optimal_degree(a_a=1, b_a=1, a_e=1, b_e=1, n_d=1, n_e=1, method="printed")  # type: ignore[arg-type]


def test_layers_of_other_shapes_are_refused() -> None:
    known: dict[str, Any] = {"a_a": 1e-5, "b_a": 1e-10, "a_e": 1e-5, "b_e": 1e-13}
    with pytest.raises(ValueError, match="one a layer"):
        optimal_degrees(**known, n_d=np.ones((2, 2)), n_e=1)
    with pytest.raises(ValueError, match="broadcast"):
        optimal_degrees(**known, n_d=np.ones(2), n_e=np.ones(3))


def test_a_call_takes_50_microseconds_and_a_thousand_layers_2_milliseconds() -> None:
    known, rng = constants(PRESETS["rtx2080ti-16"]), np.random.default_rng(0)
    n_d = rng.uniform(1e6, 1e9, 1000)

    def least_s(call: Callable[[], object], times: int) -> float:
        return min(timeit.repeat(call, number=1, repeat=times))

    assert least_s(lambda: optimal_degree(**known, n_d=1e8, n_e=1e11), 500) < 50e-6
    assert least_s(lambda: optimal_degrees(**known, n_d=n_d, n_e=n_d * 1024), 50) < 2e-3


any_s = st.floats(-7, -1).map(lambda x: 10**x)


@pytest.mark.parametrize(
    ("name", "wrong", "mean_loss"),
    [("rtx2080ti-16", 138, 0.185), ("rtx2080ti-32", 2, 0.010), ("rtx2080ti-64", 42, 0.031)],
)
def test_algorithm_1_as_printed_is_wrong_on_table_iv_as_counted_before(name: str, wrong: int, mean_loss: float) -> None:
    preset = PRESETS[name]
    known = constants(preset)
    losses: dict[tuple[float, float], float] = {}
    for layer in table_iv():
        work = layer.dispatched_bytes(), layer.multiply_adds()
        if work not in losses:
            printed = optimal_degree(**known, n_d=work[0], n_e=work[1], backward=0, method="paper")
            table = pass_seconds(known, *work, 1.0)
            losses[work] = float(table[printed.forward - 1] / table.min() - 1)
    all_losses = np.array([losses[layer.dispatched_bytes(), layer.multiply_adds()] for layer in table_iv()])
    assert (all_losses > 1e-9).sum() == wrong
    assert all_losses[all_losses > 1e-9].mean() == pytest.approx(mean_loss, abs=5e-4)


def test_the_paper_method_gives_one_degree_with_the_exact_optimum_as_its_bound() -> None:
    preset, n_d = PRESETS["rtx2080ti-16"], 4.0 * 2**24
    layer: dict[str, Any] = {**constants(preset), "n_d": n_d, "n_e": n_d * 2048}
    printed, exact = optimal_degree(**layer, method="paper"), optimal_degree(**layer)
    assert printed.forward == printed.backward == printed.joint
    assert printed.outcome.status is Status.FEASIBLE
    assert printed.outcome.bound == exact.outcome.objective.value
    assert known(printed.outcome.gap) > 0.1
    assert optimal_degree(**layer, method="paper", max_degree=1).joint == 1


@settings(max_examples=60)
@given(any_s, any_s, any_s, any_s)
def test_any_layer_gets_a_degree_no_better_than_the_exact_one(a_a: float, a_e: float, d: float, e: float) -> None:
    printed = optimal_degree(a_a=a_a, b_a=d, a_e=a_e, b_e=e, n_d=1, n_e=1, method="paper")
    assert printed.forward >= 1
    assert printed.outcome.objective.value >= known(printed.outcome.bound)


def test_equal_starts_divide_by_nothing() -> None:
    assert optimal_degree(a_a=1e-4, b_a=1, a_e=1e-4, b_e=2, n_d=1, n_e=1, method="paper").forward >= 1


def test_work_counts_bytes_and_multiply_adds_and_local_experts_change_neither() -> None:
    one, two = list(table_iv())[:2]
    assert (one.local_experts, two.local_experts) == (1, 2)
    assert one.dispatched_bytes() == two.dispatched_bytes() == 4 * 2 * 512 * 1024
    assert one.dispatched_bytes(top_k=2, capacity_factor=1.5, element_bytes=2) == 6 * 2 * 512 * 1024
    assert one.multiply_adds(top_k=2, capacity_factor=1.5) == 3 * 2 * 512 * 1024 * 1024


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
    assert (forward.backward.tolist(), forward.backward_s.tolist()) == ([1], [0])
    assert forward.joint == forward.forward


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
