"""Cuts into equal and into unequal chunks, how long passes in chunks take, and rows under a fixed capacity."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InputError
from moeplan.planner.evaluate.chunks import Cut, Cuts, Pipeline, capacity, later
from moeplan.planner.evaluate.costs import CostModel
from moeplan.planner.evaluate.scene import Passes
from moeplan.planner.evaluate.sums import dropped_share
from moeplan.planner.evaluate.tally import COUNTS, Ports, Tally
from moeplan.profilers.fits.fit import Prediction
from moeplan.runtime.decisions import ChunkShares, DispatchModel, PipelineDecision
from moeplan.runtime.engine.chunks import Chunks
from moeplan.solvers.pipemoe import simulate
from tests.builders import known, model
from tests.planner.makers import options, planned, seconds, training


def test_unequal_chunks_help_where_experts_take_long_and_never_take_longer_than_equal_ones(
    make_trace: Any, make_profile: Any, tmp_path: Path
) -> None:
    asked = {"profile": make_profile("1x2", noise=0.0), "fit_fraction": 1.0, "max_degree": 8}
    plain = make_trace(samples=32, tokens=400)
    for trace, trains in ((plain, False), (training(plain, tmp_path), True)):
        plan, equal = (planned(trace, "pipemoe", method=method, **asked) for method in ("unequal", "exact"))
        decision = plan.decisions.pipeline
        assert [*map(len, decision.shares.forward)] == [*decision.forward]
        assert (decision.shares.backward is None) == (decision.backward is None) == (not trains)
        assert any(len(set(one)) > 1 for one in decision.shares.forward)
        value = sum(seconds(plan, "plan/standard", name) for name in ["moe_s"] + ["moe_backward_s"] * trains)
        assert value == pytest.approx(plan.outcome["pipeline"].objective.value, rel=1e-12)
        assert value < 0.995 * equal.outcome["pipeline"].objective.value
        assert seconds(plan, "exact/standard", "moe_s") == seconds(equal, "plan/standard", "moe_s")
        assert plan.outcome["pipeline"].bound is None


def test_equal_shares_take_what_equal_degrees_take() -> None:
    rows = np.arange(1, 2000)[None, :, None] * np.ones((1, 1, 3), np.int64)
    for degree in (1, 2, 3, 7, 32, 49):
        equal = Cut.equal(degree, 1999).parts(rows)[0]
        for part in Cut.of(((1 / degree,) * degree,) * 1999).parts(rows):
            assert (part == equal).all()


Shares = tuple[tuple[float, ...], ...]
nested = st.tuples(st.integers(1, 6), st.integers(1, 5), st.booleans()).map(
    lambda one: (one[0], one[0] * one[1])[:: -1 if one[2] else 1]
)
chunks = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(lambda x: tuple(weight / sum(x) for weight in x))


def decided(forward: Shares, backward: Shares) -> PipelineDecision:
    """Passes whose layers are cut into these shares."""
    shares = ChunkShares(forward=forward, backward=backward)
    return PipelineDecision(forward=tuple(map(len, forward)), backward=tuple(map(len, backward)), shares=shares)


@given(st.lists(nested, min_size=1, max_size=3), st.integers(1, 99))
def test_calls_and_padding_are_the_runtimes(pairs: list[tuple[int, int]], capacity: int) -> None:
    forward, backward = zip(*pairs, strict=True)
    decision = PipelineDecision(forward=forward, backward=backward)
    made = [Chunks.planned(decision, layer) for layer in range(len(pairs))]
    cuts = Cuts.of(decision)
    ways = (cuts.forward, [one.forward for one in made]), (known(cuts.backward), [one.backward for one in made])
    for cut, passes in ways:
        assert [*map(len, passes)] == cut.degree.tolist()
        assert [{*map(len, chunks)} for chunks in passes] == [{calls} for calls in cut.calls.tolist()]
        rows = np.full((1, len(pairs)), capacity)
        assert cut.padded(rows).tolist() == [[one.padded(capacity) for one in made]]
        (sizes,), (calls,) = cut.padded_sizes(rows), cut.parts(rows, cut.calls)
        assert (sizes * cut.degree).tolist() == cut.padded(rows).tolist()
        assert (calls * cut.calls).tolist() == sizes.tolist()


@given(st.lists(chunks, min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 5))
def test_shares_that_serve_both_passes_are_one_call_each_and_equal_ones_nest(
    shares: list[tuple[float, ...]], fewer: int, times: int
) -> None:
    more = fewer * times
    forward, backward = (*shares, (1 / fewer,) * fewer), (*shares, (1 / more,) * more)
    decision = decided(forward, backward)
    cuts = Cuts.of(decision)
    there, back = cuts.forward, known(cuts.backward)
    assert there.calls.tolist() == [*([1] * len(shares)), times]
    assert back.calls.tolist() == [1] * len(forward)
    made = [Chunks.planned(decision, layer).num_pieces for layer in range(len(forward))]
    assert (there.degree * there.calls).tolist() == made
    rows = np.full((1, len(forward)), 7 * more)
    assert there.padded(rows)[0, -1] == back.padded(rows)[0, -1] == 7 * more


@given(chunks, st.integers(1, 99))
def test_a_buffer_in_unequal_chunks_is_cut_as_the_runtime_does(shares: tuple[float, ...], capacity: int) -> None:
    decision = decided((shares,), (shares,))
    made, cut = Chunks.planned(decision, 0), Cuts.of(decision).forward
    rows = np.array([[capacity]])
    padded = made.padded(capacity)
    assert cut.padded(rows).item() == padded
    pieces = made.piece_of(padded, torch.device("cpu")).bincount(minlength=made.num_pieces).tolist()
    assert [one.item() for one in cut.padded_sizes(rows)] == pieces


# Nearer than 1e-10, and still of two pieces more where the runtime rounds.
STRADDLING = (0.12345678949, 1 - 0.12345678949), (0.12345678951, 1 - 0.12345678951)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [((0.1 + 0.2, 0.7), (0.3, 0.7)), ((0.33333333334, 0.33333333333, 0.33333333333), (1 / 6,) * 6)],
)
def test_shares_that_differ_by_rounding_are_the_same(forward: tuple[float, ...], backward: tuple[float, ...]) -> None:
    assert Cuts.of(decided((forward,), (backward,))).forward.calls.tolist() == [len(backward) // len(forward)]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ((1 / 2,) * 2, (1 / 3,) * 3),
        ((0.3, 0.7), (0.5, 0.5)),
        ((0.5, 0.5), (0.3, 0.7)),
        ((0.3, 0.7), (1.0,)),
        STRADDLING,
    ],
)
def test_passes_that_cut_each_others_chunks_unevenly_are_refused(
    forward: tuple[float, ...], backward: tuple[float, ...]
) -> None:
    words = rf"layer 1 in {len(forward)} chunks forward and {len(backward)} backward, which cut each other unevenly"
    with pytest.raises(InputError, match=words):
        Cuts.of(decided(((1.0,), forward), ((1.0,), backward)))


def test_a_call_gets_an_equal_part_of_its_chunk() -> None:
    cuts, rows = Cuts.of(PipelineDecision(forward=(2, 6), backward=(6, 3))), np.array([[60, 61]])
    there, back = cuts.forward, known(cuts.backward)
    assert [there.calls.tolist(), back.calls.tolist()] == [[3, 1], [1, 2]]
    for sizes, expected in (
        (there.parts(rows, there.calls), [[[10, 11]]]),
        (back.parts(rows), [[[10, 21]]]),
        (back.padded_sizes(rows), [[[10, 22]]]),
    ):
        assert [one.tolist() for one in sizes] == expected


STAGES = st.tuples(*[st.floats(0, 10)] * 3)


@given(st.lists(STAGES, min_size=1, max_size=6), st.integers(1, 9), st.booleans())
def test_chunks_end_when_a_simulation_of_them_does(chunks: Any, degree: int, full_duplex: bool) -> None:
    unequal, equal = Cut.of([(1 / len(chunks),) * len(chunks)]), Cut.equal(degree, 1)
    for cut, every, one_each in ((unequal, chunks, chunks), (equal, chunks[:1] * degree, chunks[:1])):
        stages = [np.array(column)[:, None, None] for column in zip(*one_each, strict=True)]
        ends = simulate(*zip(*every, strict=True), full_duplex=full_duplex)[-1].end_s
        assert cut.layer_s(*stages, full_duplex=full_duplex).item() == pytest.approx(ends)


def test_a_step_is_attention_and_both_passes(make_trace: Any, make_profile: Any, tmp_path: Path) -> None:
    plan = planned(training(make_trace(samples=40, tokens=400), tmp_path), "pipemoe", profile=make_profile())
    assert min(plan.decisions.pipeline.forward) > 1
    parts = [seconds(plan, "plan/standard", name) for name in ("attention_s", "moe_s", "moe_backward_s")]
    assert seconds(plan, "plan/standard", "step_s") == pytest.approx(sum(parts))
    busy = [seconds(plan, "plan/standard", name) for name in ("dispatch_s", "experts_s", "combine_s")]
    assert max(busy[0] + busy[2], busy[1]) <= parts[1] < sum(busy)
    assert (plan.verdict.metric, plan.verdict.against) == ("step_s", "contiguous/standard")


@pytest.mark.parametrize("cluster", ["1x4", "2x2"])
def test_under_a_fixed_capacity_every_chunk_is_of_whole_padded_rows_whatever_is_routed_where(
    make_trace: Any, make_profile: Any, cluster: str
) -> None:
    """Rows of an expert from a device as Tutel counts them; all of them are sent and computed in every chunk."""
    trace, profile = make_trace(samples=16, tokens=75, layers=2), make_profile(cluster, noise=0.0)
    plan = planned(trace, "pipemoe", profile=profile, fit_fraction=1.0, max_degree=6, capacity_factor=1.3)
    group = int(cluster[2])
    rows = 2 * int(1.3 * -(-(4 * 75) // 8))  # top-2, 4 samples a device, 8 experts

    def taken(degree: int) -> float:
        chunk = -(-rows // degree)
        exchange = max(
            (20e-6 + 1e-9 * scale * 128 * 2 * peers * chunk)
            for peers, scale in ((group - 1, 1), (4 - group, 6))  # slower by 4, for 3 of 4 parts where 2 cross
            if peers
        )
        experts = 40e-6 + 1e-10 * 3 * 64 * 96 * 2 * 4 * chunk
        return simulate([exchange] * degree, [experts] * degree, [exchange] * degree)[-1].end_s

    forward, table = plan.decisions.pipeline.forward, [taken(degree) for degree in range(1, 7)]
    for degree in forward:
        assert table[degree - 1] == pytest.approx(min(table), rel=0.01)
    assert seconds(plan, "plan/standard", "moe_s") == pytest.approx(2 * min(table), rel=0.02)
    assert seconds(plan, "degree_1/standard", "moe_s") == pytest.approx(2 * table[0], rel=0.02)
    assert options(plan).a2a_ffn_overlap_degree == forward


@pytest.mark.parametrize(
    ("capacity_factor", "tokens", "rows"),
    [(1.0, 300, 76), (1.3, 300, 98), (1.37, 300, 104), (0.99, 16, 2), (2.5, 17, 14)],
)
def test_a_buffer_has_for_each_choice_the_whole_rows_of_the_factor_times_the_mean_rounded_up(
    capacity_factor: float, tokens: int, rows: int
) -> None:
    """The fullest of four devices has so many tokens, each to two of eight experts."""
    held, copies = np.array([[[tokens, tokens - 1, 1, 0]]]), np.zeros((1, 3, 1, 2, 4), np.int64)
    ports = Ports(copies, copies, copies[:, :, 0], held, held)
    tally = Tally(np.zeros((1, len(COUNTS)), np.int64), copies[:, :, 0, 0], np.full(4, 2), ports)
    assert capacity(tally, model(), capacity_factor).tolist() == [[rows] * 3]


def test_pairs_beyond_a_buffer_are_dropped_buffer_by_buffer() -> None:
    sent_BLDE = np.array([[[[5, 1], [0, 2]]], [[[1, 1], [1, 1]]]], np.int32)
    assert dropped_share(sent_BLDE, np.array([[2], [1]])) == 3 / 12
    assert dropped_share(sent_BLDE, np.array([[5], [1]])) == 0


def test_an_agreement_is_that_of_the_slowest_link_class_and_nothing_takes_less_than_no_time() -> None:
    costs = CostModel(agreements=[(1e-6, 8e-6), (3e-6, 6e-6)])
    scene: Any = SimpleNamespace(costs=costs)
    tally: Any = None
    expected: dict[DispatchModel, float] = {"standard": 3e-6, "migrating": 8e-6}
    for dispatch_model, agreed_s in expected.items():
        timed = Pipeline(tally, scene, Passes(2.0, full_duplex=False), dispatch_model)
        assert timed.agreement_s == agreed_s
    level = np.array([1e-6, 5e-6])
    less = later(Prediction(level, level / 2, 2 * level, level > 2e-6), -2e-6)
    assert [*less.seconds, *less.low, *less.high] == pytest.approx([0, 3e-6, 0, 0.5e-6, 0, 8e-6])
    assert less.extrapolated.tolist() == [False, True]
