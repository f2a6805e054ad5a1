"""Naive twins of the evaluation: intervals draw by draw, passes chunk by chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moeplan.planner.evaluate.chunks import Cut
from moeplan.planner.evaluate.sums import DRAWS, difference, interval, resampled_sums

VALUES = arrays.arrays(np.float64, st.tuples(st.integers(2, 9), st.just(2)), elements=st.floats(0, 1e6))


def naive_draws(values_UC: np.ndarray, seed: int) -> list[np.ndarray]:
    """The sums of every draw, each drawn and added by itself."""
    rng = np.random.default_rng(seed)
    return [values_UC[rng.integers(len(values_UC), size=len(values_UC))].sum(axis=0) for _ in range(DRAWS)]


@given(VALUES, st.integers(0, 99))
def test_resampled_sums_are_those_of_draws_one_by_one(values_UC: np.ndarray, seed: int) -> None:
    found_RC = resampled_sums(values_UC, seed=seed)
    np.testing.assert_allclose(found_RC[0], values_UC.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found_RC[1:], naive_draws(values_UC, seed), rtol=1e-9, atol=1e-6)


@given(VALUES, st.integers(0, 99))
def test_a_gain_is_paired_and_its_errors_are_those_of_each_source(values_UC: np.ndarray, seed: int) -> None:
    """Two sources, one of which only one side has; levels err together, sources alone."""
    sums_RC = resampled_sums(values_UC, seed=seed) / len(values_UC)
    ours = {"links": np.stack([sums_RC[:, 0] * level for level in (0.9, 1.0, 1.2)])}
    theirs = {"links": np.stack([sums_RC[:, 1] * level for level in (0.8, 1.0, 1.1)]), "experts": sums_RC[None, :, 0]}
    lows, highs = [], []
    for mine, other in np.array(naive_draws(values_UC, seed)) / len(values_UC):
        levels = [other * b - mine * a for a, b in ((0.9, 0.8), (1.0, 1.0), (1.2, 1.1))]
        lows.append(min(levels) + mine)
        highs.append(max(levels) + mine)
    expected = np.quantile(lows, 0.025), np.quantile(highs, 0.975)
    found = np.array(interval(difference(ours, theirs)), np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-5)


SECONDS = st.floats(0, 10)
STAGES = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=6)


def finished(chunks: list[tuple[float, float, float]], *, full_duplex: bool) -> float:
    """When the last combine ends; dispatches go before combines where both use one channel."""
    dispatched = computed = combined = 0.0
    ends = []
    for dispatch, experts, _ in chunks:
        dispatched += dispatch
        computed = max(dispatched, computed) + experts
        ends.append(computed)
    combined = 0.0 if full_duplex else dispatched
    for end, (_, _, combine) in zip(ends, chunks, strict=True):
        combined = max(combined, end) + combine
    return combined


@given(STAGES, st.booleans())
def test_unequal_chunks(chunks: list[tuple[float, float, float]], full_duplex: bool) -> None:
    cut = Cut.of([(1 / len(chunks),) * len(chunks)])
    stages = [np.array(column)[:, None, None] for column in zip(*chunks, strict=True)]
    found = cut.taken(*stages, full_duplex=full_duplex)
    assert found.item() == pytest.approx(finished(chunks, full_duplex=full_duplex))


@given(st.tuples(SECONDS, SECONDS, SECONDS), st.integers(1, 9), st.booleans())
def test_equal_chunks(chunk: tuple[float, float, float], degree: int, full_duplex: bool) -> None:
    stages = [np.full((1, 1, 1), seconds) for seconds in chunk]
    found = Cut.equal(degree, 1).taken(*stages, full_duplex=full_duplex)
    assert found.item() == pytest.approx(finished([chunk] * degree, full_duplex=full_duplex))
