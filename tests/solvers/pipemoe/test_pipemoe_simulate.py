import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipemoe_presets import PRESETS, table_iv
from moeplan.solvers.pipemoe.seconds import Stage, chunk_seconds, layer_seconds, pass_arms, simulate

Simulated = Callable[[Sequence[float], Sequence[float], Sequence[float], bool], float]
stage_s = st.floats(0, 10)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), stage_s, stage_s, stage_s, st.booleans())
def test_equal_chunks_take_what_the_formula_says(
    simulated: Simulated, r: int, t_d: float, t_e: float, t_c: float, full_duplex: bool
) -> None:
    expected = simulated([t_d] * r, [t_e] * r, [t_c] * r, full_duplex)
    dispatch_s, experts_s, combine_s = np.array([[t_d], [t_e], [t_c]])
    found = layer_seconds(np.array([r]), dispatch_s, experts_s, combine_s, full_duplex=full_duplex)
    assert found[0] == pytest.approx(expected)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(stage_s, stage_s, stage_s), min_size=1, max_size=9), st.booleans())
def test_the_schedule_of_any_chunks_ends_with_the_event_simulation(
    simulated: Simulated, chunks: list[tuple[float, float, float]], full_duplex: bool
) -> None:
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(stage_s, stage_s, stage_s), min_size=1, max_size=9), st.booleans(), st.integers(0, 3))
def test_unequal_chunks_vectorised_take_what_the_event_simulation_says(
    simulated: Simulated, chunks: list[tuple[float, float, float]], full_duplex: bool, missing: int
) -> None:
    dispatch_s, experts_s, combine_s = stages = [list(stage) for stage in zip(*chunks, strict=True)]
    others = [[2 * seconds for seconds in stage[:1]] + [0.0] * (len(stage) - 1) for stage in stages]  # of one chunk
    tables = [
        np.array([*zip(*pair, strict=True), *[(0.0, 0.0)] * missing]) for pair in zip(stages, others, strict=True)
    ]
    found = chunk_seconds(*tables, full_duplex=full_duplex)
    assert found[0] == pytest.approx(simulated(dispatch_s, experts_s, combine_s, full_duplex))
    assert found[1] == pytest.approx(simulated(others[0][:1], others[1][:1], others[2][:1], full_duplex))


@pytest.mark.parametrize("full_duplex", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_the_arms_give_the_time_of_the_schedule_on_table_iv(simulated: Simulated, name: str, full_duplex: bool) -> None:
    preset = PRESETS[name]
    for layer in list(table_iv())[::7]:
        d, e = preset.b_a * layer.dispatched_bytes(), preset.b_e * layer.multiply_adds()
        p1, q1, s1, p2, q2, s2 = pass_arms(preset.a_a, d, preset.a_e, e, 1.0, 1.0, full_duplex=full_duplex)
        for r in (1, 2, 3, 8, 32):
            t_d, t_e = preset.a_a + d / r, preset.a_e + e / r
            found = max(p1 + q1 * r + s1 / r, p2 + q2 * r + s2 / r)
            assert found == pytest.approx(simulated([t_d] * r, [t_e] * r, [t_d] * r, full_duplex), rel=1e-9)


def test_the_first_combine_waits_for_the_last_dispatch_on_one_channel() -> None:
    half, full = simulate([1, 1, 1], [0.1] * 3, [1, 1, 1]), simulate([1, 1, 1], [0.1] * 3, [1, 1, 1], full_duplex=True)
    assert [event.start_s for event in half[6:]] == [3, 4, 5]  # Eq. 11 as printed would start it at 1.1
    assert full[6].start_s == pytest.approx(1.1)


@pytest.mark.parametrize("stages", [([], [], []), ([1.0], [1.0], [1.0, 1.0])])
def test_stages_that_do_not_fit_together_are_refused(stages: tuple[list[float], list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="chunks"):
        simulate(*stages)
