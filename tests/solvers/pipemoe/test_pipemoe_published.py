from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.pipemoe_presets import PRESETS, Preset, table_iv
from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import optimal_degree

Array = NDArray[Any]
positive = st.floats(-7, -1).map(lambda x: 10**x)


def constants(preset: Preset) -> dict[str, Any]:
    return {"a_a": preset.a_a, "b_a": preset.b_a, "a_e": preset.a_e, "b_e": preset.b_e}


@pytest.mark.parametrize(
    ("name", "wrong", "mean_loss"),
    [("rtx2080ti-16", 138, 0.185), ("rtx2080ti-32", 2, 0.010), ("rtx2080ti-64", 42, 0.031)],
)
def test_algorithm_1_as_printed_is_wrong_on_table_iv_as_often_as_computed_before(
    name: str, wrong: int, mean_loss: float, brute_force: Callable[..., Array]
) -> None:
    preset = PRESETS[name]
    known = constants(preset)
    losses: dict[tuple[float, float], float] = {}
    for layer in table_iv():
        work = layer.dispatched_bytes(), layer.multiply_adds()
        if work not in losses:
            printed = optimal_degree(**known, n_d=work[0], n_e=work[1], backward=0, method="paper")
            table = brute_force(*known.values(), *map(np.float64, work), 1.0)
            losses[work] = float(table[printed.forward - 1] / table.min() - 1)
    all_losses = np.array([losses[layer.dispatched_bytes(), layer.multiply_adds()] for layer in table_iv()])
    assert (all_losses > 1e-9).sum() == wrong
    assert all_losses[all_losses > 1e-9].mean() == pytest.approx(mean_loss, abs=5e-4)


def test_algorithm_1_promises_two_chunks_a_time_that_they_do_not_attain() -> None:
    preset, n_d = PRESETS["rtx2080ti-16"], 4.0 * 2**24
    printed = optimal_degree(**constants(preset), n_d=n_d, n_e=n_d / 4 * 8192, backward=0, method="paper")
    promised_s = 4 * preset.a_a + 2 * preset.b_a * n_d
    assert printed.forward == 2
    assert printed.forward_s > 1.6 * promised_s


def test_the_paper_method_gives_one_degree_with_the_exact_optimum_as_its_bound() -> None:
    preset, n_d = PRESETS["rtx2080ti-16"], 4.0 * 2**24
    layer: dict[str, Any] = {**constants(preset), "n_d": n_d, "n_e": n_d * 2048}
    printed, exact = optimal_degree(**layer, method="paper"), optimal_degree(**layer)
    assert printed.forward == printed.backward == printed.joint
    assert printed.outcome.status is Status.FEASIBLE
    assert printed.outcome.bound == exact.outcome.objective.value
    assert printed.outcome.gap is not None
    assert printed.outcome.gap > 0.1
    assert optimal_degree(**layer, method="paper", max_degree=1).joint == 1


@settings(max_examples=60, deadline=None)
@given(positive, positive, positive, positive)
def test_any_layer_gets_a_degree_no_better_than_the_exact_one(a_a: float, a_e: float, d: float, e: float) -> None:
    printed = optimal_degree(a_a=a_a, b_a=d, a_e=a_e, b_e=e, n_d=1, n_e=1, method="paper")
    assert printed.forward >= 1
    assert printed.outcome.bound is not None
    assert printed.outcome.objective.value >= printed.outcome.bound


def test_equal_starts_divide_by_nothing() -> None:
    assert optimal_degree(a_a=1e-4, b_a=1, a_e=1e-4, b_e=2, n_d=1, n_e=1, method="paper").forward >= 1


def test_table_iv_has_288_configurations_all_different() -> None:
    layers = list(table_iv())
    assert len(layers) == len(set(layers)) == 288
    assert Counter(layer.ffn for layer in layers) == dict.fromkeys((1024, 2048, 4096, 8192), 72)
    assert Counter(layer.batch for layer in layers) == dict.fromkeys((2, 4, 8), 96)


def test_work_counts_bytes_and_multiply_adds_and_local_experts_change_neither() -> None:
    one, two = list(table_iv())[:2]
    assert (one.local_experts, two.local_experts) == (1, 2)
    assert one.dispatched_bytes() == two.dispatched_bytes() == 4 * 2 * 512 * 1024
    assert one.dispatched_bytes(top_k=2, capacity_factor=1.5, element_bytes=2) == 6 * 2 * 512 * 1024
    assert one.multiply_adds(top_k=2, capacity_factor=1.5) == 3 * 2 * 512 * 1024 * 1024


def test_the_presets_are_those_of_the_paper_in_our_units() -> None:
    assert {preset.num_devices: (preset.a_a, preset.b_a) for preset in PRESETS.values()} == {
        16: (1.72e-5, 2.96e-10),
        32: (2.09e-4, 3.54e-10),
        64: (7.83e-4, 3.84e-10),
    }
    for preset in PRESETS.values():
        assert preset.a_e == 2 * 6.19e-5
        per_byte_s, n_e = 2 * 4.1e-14, 4.0 * 4096 * 1024 * 1024  # the paper's n_e counts bytes of fp32
        assert preset.b_e * n_e / 4 == per_byte_s * n_e
    assert "slip" in PRESETS["rtx2080ti-16"].note
