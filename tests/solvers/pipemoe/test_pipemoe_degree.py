import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.pipemoe_presets import PRESETS, Preset, table_iv
from moeplan.solvers.outcome import Status
from moeplan.solvers.pipemoe import TUTEL_MAX_DEGREE, optimal_degree, optimal_degrees

Array = NDArray[Any]
BruteForce = Callable[..., Array]
CASES = [(name, top_k) for name in PRESETS for top_k in (1, 2)]
seconds = st.floats(-7, -2).map(lambda x: 10**x)  # to start
work_s = st.floats(-6, -0.3).map(lambda x: 10**x)


def constants(preset: Preset) -> dict[str, Any]:
    return {"a_a": preset.a_a, "b_a": preset.b_a, "a_e": preset.a_e, "b_e": preset.b_e}


def works(top_k: int) -> tuple[Array, Array]:
    layers = list(table_iv())
    n_d = np.array([layer.dispatched_bytes(top_k=top_k) for layer in layers])
    return n_d, np.array([layer.multiply_adds(top_k=top_k) for layer in layers])


@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize(("name", "top_k"), CASES)
def test_under_any_limit_every_layer_of_table_iv_gets_the_degrees_of_a_brute_force_up_to_it(
    name: str, top_k: int, full_duplex: bool, brute_force: BruteForce
) -> None:
    known, (n_d, n_e) = constants(PRESETS[name]), works(top_k)
    forward, backward = (brute_force(*known.values(), n_d, n_e, factor, full_duplex) for factor in (1.0, 2.0))
    for limit in (None, 1, 3, TUTEL_MAX_DEGREE):
        options: dict[str, Any] = {"max_degree": limit, "full_duplex": full_duplex}
        tables = [table[:, :limit] for table in (forward, backward, forward + backward)]
        expected = np.array([table.argmin(axis=1) + 1 for table in tables])
        many = optimal_degrees(**known, n_d=n_d, n_e=n_e, **options)
        ones = [optimal_degree(**known, n_d=d, n_e=e, **options) for d, e in zip(n_d, n_e, strict=True)]
        assert [many.forward.tolist(), many.backward.tolist(), many.joint.tolist()] == expected.tolist()
        assert [[one.forward, one.backward, one.joint] for one in ones] == expected.T.tolist()
        assert many.joint_s == pytest.approx(tables[2].min(axis=1), rel=1e-12)
        least_s = [table.min(axis=1) for table in tables[:2]]
        assert [one.forward_s for one in ones] == pytest.approx(least_s[0], rel=1e-12)
        assert [one.outcome.objective.value for one in ones] == pytest.approx(sum(least_s), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("rtx2080ti-16", {2: 144, 4: 74, 8: 70}),
        ("rtx2080ti-32", {2: 216, 4: 20, 8: 52}),
        ("rtx2080ti-64", {1: 30, 2: 194, 4: 44, 8: 20}),
    ],
)
def test_the_best_of_four_degrees_on_table_iv_is_distributed_as_computed_before(
    name: str, counts: dict[int, int], brute_force: BruteForce
) -> None:
    n_d, n_e = works(1)
    table = brute_force(*constants(PRESETS[name]).values(), n_d, n_e, 1.0)[:, [0, 1, 3, 7]]
    degrees, found = np.unique(np.array([1, 2, 4, 8])[table.argmin(axis=1)], return_counts=True)
    assert dict(zip(degrees.tolist(), found.tolist(), strict=True)) == counts


@settings(max_examples=150, deadline=None)
@given(seconds, seconds, work_s, work_s, st.sampled_from([0.0, 0.5, 2.0, 3.0]), st.booleans())
def test_any_layer_takes_no_longer_than_the_best_of_4000_degrees(
    a_a: float, a_e: float, d: float, e: float, backward: float, full_duplex: bool
) -> None:
    from moeplan.solvers.pipemoe.seconds import layer_seconds

    found = optimal_degree(a_a=a_a, b_a=d, a_e=a_e, b_e=e, n_d=1, n_e=1, backward=backward, full_duplex=full_duplex)
    r = np.arange(1, 4001)
    t_d, t_e = a_a + d / r, a_e + e / r
    forward = layer_seconds(r, t_d, t_e, t_d, full_duplex=full_duplex)
    back = layer_seconds(r, t_d, backward * t_e, t_d, full_duplex=full_duplex) * (backward > 0)
    assert found.forward_s == pytest.approx(forward.min(), rel=1e-12)
    assert found.backward_s == pytest.approx(back.min(), rel=1e-12)
    assert found.joint_s == pytest.approx((forward + back).min(), rel=1e-12)
    assert found.outcome.status is Status.OPTIMAL
    assert found.outcome.gap == 0
    assert (np.diff(forward, 2) >= -1e-12 * forward[1:-1]).all()  # convex
    many = optimal_degrees(a_a=[a_a], b_a=d, a_e=a_e, b_e=e, n_d=1, n_e=1, backward=backward, full_duplex=full_duplex)
    assert [column[0] for column in astuple(many)[:6]] == list(astuple(found)[:6])


@settings(max_examples=60, deadline=None)
@given(seconds, seconds, work_s, work_s, st.floats(0.1, 1), st.integers(-8, 8))
def test_a_faster_machine_never_takes_longer_and_another_unit_changes_no_degree(
    a_a: float, a_e: float, d: float, e: float, share: float, power: int
) -> None:
    known: dict[str, Any] = {"a_a": a_a, "b_a": d, "a_e": a_e, "b_e": e}
    base = optimal_degree(**known, n_d=1, n_e=1)
    for name in known:
        faster = optimal_degree(**{**known, name: share * known[name]}, n_d=1, n_e=1)
        assert faster.outcome.objective.value <= base.outcome.objective.value * (1 + 1e-12)
        assert faster.joint_s <= base.joint_s * (1 + 1e-12)
    unit = 2.0**power
    other = optimal_degree(**{name: unit * value for name, value in known.items()}, n_d=1, n_e=1)
    assert (other.forward, other.backward, other.joint) == (base.forward, base.backward, base.joint)
    assert other.joint_s == unit * base.joint_s
    elements = optimal_degree(a_a=a_a, b_a=unit * d, a_e=a_e, b_e=unit * e, n_d=1 / unit, n_e=1 / unit)
    assert elements.joint == base.joint


def test_a_limit_binds_and_the_time_is_the_limits(brute_force: BruteForce) -> None:
    known, n = constants(PRESETS["rtx2080ti-16"]), 4.0 * 2**27
    free = optimal_degree(**known, n_d=n, n_e=n * 2048)
    bound = optimal_degree(**known, n_d=n, n_e=n * 2048, max_degree=TUTEL_MAX_DEGREE)
    assert free.forward > TUTEL_MAX_DEGREE == bound.forward
    assert bound.forward_s == pytest.approx(brute_force(*known.values(), n, n * 2048, 1.0)[TUTEL_MAX_DEGREE - 1])
    assert optimal_degree(**known, n_d=n, n_e=n * 2048, max_degree=1).joint == 1


def test_equal_degrees_go_to_the_smallest() -> None:
    free_start: dict[str, Any] = {"a_a": 0.0, "b_a": 1.0, "a_e": 0.0, "b_e": 0.5, "n_d": 1.0, "n_e": 1.0}
    assert optimal_degree(**free_start, max_degree=64, backward=0).forward == 2  # 2 d from r = 2 on
    assert optimal_degree(a_a=1, b_a=0, a_e=0, b_e=1, n_d=1, n_e=1).joint == 1


def test_without_a_backward_pass_one_degree_for_both_is_that_of_the_forward_pass() -> None:
    known, (n_d, n_e) = constants(PRESETS["rtx2080ti-64"]), works(1)
    alone = optimal_degrees(**known, n_d=n_d, n_e=n_e, backward=0)
    assert alone.joint.tolist() == alone.forward.tolist()
    assert not alone.backward_s.any()


@pytest.mark.parametrize(
    ("experts_s", "start_s", "limit"), [(1.0, 0.0, 1.50), (1.0, 0.05, 1.43), (2.0, 0.0, 1.97), (2.0, 0.05, 1.52)]
)
def test_what_pipelining_can_gain_is_limited(experts_s: float, start_s: float, limit: float) -> None:
    known: dict[str, Any] = {"a_a": start_s, "b_a": 1.0, "a_e": start_s, "b_e": experts_s, "n_d": 1.0, "n_e": 1.0}
    best = optimal_degree(**known, backward=0, max_degree=64)
    whole = optimal_degree(**known, backward=0, max_degree=1)
    assert round(whole.forward_s / best.forward_s, 2) == limit


@pytest.mark.parametrize(
    "wrong",
    [
        {"a_a": -1e-6},
        {"b_e": float("nan")},
        {"n_d": float("inf")},
        {"backward": -1},
        {"max_degree": 0},
        {"a_a": 0, "a_e": 0},
    ],
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
