import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipemoe_presets import PRESETS, Preset, table_iv
from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import TUTEL_MAX_DEGREE, optimal_degree, optimal_degrees
from tests.builders import known
from tests.solvers.builders import pass_seconds

seconds = st.floats(-7, -2).map(lambda x: 10**x)  # to start
work_s = st.floats(-6, -0.3).map(lambda x: 10**x)


def constants(preset: Preset) -> dict[str, Any]:
    return {"a_a": preset.a_a, "b_a": preset.b_a, "a_e": preset.a_e, "b_e": preset.b_e}


@settings(max_examples=200)
@given(
    st.fixed_dictionaries({"a_a": seconds, "b_a": work_s, "a_e": seconds, "b_e": work_s}),
    st.sampled_from([0.0, 0.5, 2.0, 3.0]),
    st.sampled_from([None, 1, 3, TUTEL_MAX_DEGREE]),
    st.booleans(),
)
def test_any_layer_takes_as_long_as_with_the_best_of_4000_degrees_within_the_limit(
    layer: dict[str, float], backward: float, limit: int | None, full_duplex: bool
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

    def least(call: Callable[[], object], times: int) -> float:
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        return min(taken)

    assert least(lambda: optimal_degree(**known, n_d=1e8, n_e=1e11), 500) < 50e-6
    assert least(lambda: optimal_degrees(**known, n_d=n_d, n_e=n_d * 1024), 50) < 2e-3


positive = st.floats(-7, -1).map(lambda x: 10**x)


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
@given(positive, positive, positive, positive)
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
