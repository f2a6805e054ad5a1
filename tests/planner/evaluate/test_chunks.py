"""Cuts into equal and into unequal chunks, and how long passes in chunks take."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import InputError
from moeplan.planner.evaluate.chunks import Cut, Cuts
from moeplan.runtime.decisions import ChunkShares, PipelineDecision
from moeplan.runtime.engine.chunks import Chunks
from tests.builders import known
from tests.planner.makers import planned, seconds, training


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


nested = st.tuples(st.integers(1, 6), st.integers(1, 5), st.booleans()).map(
    lambda one: (one[0], one[0] * one[1])[:: -1 if one[2] else 1]
)
chunks = st.lists(st.integers(1, 4), min_size=1, max_size=6).map(lambda x: tuple(weight / sum(x) for weight in x))


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
    decision = PipelineDecision(
        forward=tuple(map(len, forward)),
        backward=tuple(map(len, backward)),
        shares=ChunkShares(forward=forward, backward=backward),
    )
    cuts = Cuts.of(decision)
    there, back = cuts.forward, known(cuts.backward)
    assert there.calls.tolist() == [*([1] * len(shares)), times]
    assert back.calls.tolist() == [1] * len(forward)
    made = [Chunks.planned(decision, layer).num_pieces for layer in range(len(forward))]
    assert (there.degree * there.calls).tolist() == made
    rows = np.full((1, len(forward)), 7 * more)
    assert there.padded(rows)[0, -1] == back.padded(rows)[0, -1] == 7 * more


@given(chunks, st.integers(1, 99))
def test_a_buffer_in_unequal_chunks_is_padded_and_cut_as_the_runtime_does(
    shares: tuple[float, ...], capacity: int
) -> None:
    degrees = (len(shares),)
    both = ChunkShares(forward=(shares,), backward=(shares,))
    decision = PipelineDecision(forward=degrees, backward=degrees, shares=both)
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
    shares = ChunkShares(forward=(forward,), backward=(backward,))
    cuts = Cuts.of(PipelineDecision(forward=(len(forward),), backward=(len(backward),), shares=shares))
    assert cuts.forward.calls.tolist() == [len(backward) // len(forward)]


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
    shares = ChunkShares(forward=((1.0,), forward), backward=((1.0,), backward))
    decision = PipelineDecision(forward=(1, len(forward)), backward=(1, len(backward)), shares=shares)
    words = rf"layer 1 in {len(forward)} chunks forward and {len(backward)} backward, which cut each other unevenly"
    with pytest.raises(InputError, match=words):
        Cuts.of(decision)


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


SECONDS = st.floats(0, 10)
STAGES = st.tuples(SECONDS, SECONDS, SECONDS)


def finished(chunks: list[tuple[float, float, float]], *, full_duplex: bool) -> float:
    """When the last combine ends; dispatches go before combines where both use one channel."""
    dispatched = computed = 0.0
    ends = []
    for dispatch, experts, _ in chunks:
        dispatched += dispatch
        computed = max(dispatched, computed) + experts
        ends.append(computed)
    combined = 0.0 if full_duplex else dispatched
    for end, (_, _, combine) in zip(ends, chunks, strict=True):
        combined = max(combined, end) + combine
    return combined


@given(st.lists(STAGES, min_size=1, max_size=6), st.booleans())
def test_unequal_chunks_end_when_a_walk_through_them_does(chunks: Any, full_duplex: bool) -> None:
    cut = Cut.of([(1 / len(chunks),) * len(chunks)])
    stages = [np.array(column)[:, None, None] for column in zip(*chunks, strict=True)]
    assert cut.taken(*stages, full_duplex=full_duplex).item() == pytest.approx(
        finished(chunks, full_duplex=full_duplex)
    )


@given(STAGES, st.integers(1, 9), st.booleans())
def test_equal_chunks_end_when_a_walk_through_them_does(chunk: Any, degree: int, full_duplex: bool) -> None:
    stages = [np.full((1, 1, 1), seconds) for seconds in chunk]
    taken = Cut.equal(degree, 1).taken(*stages, full_duplex=full_duplex)
    assert taken.item() == pytest.approx(finished([chunk] * degree, full_duplex=full_duplex))
