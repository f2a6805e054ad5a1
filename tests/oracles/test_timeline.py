"""What a pass of chunks takes, chunk by chunk: no closed form, every stage ends when it ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.planner.evaluate.chunks import Cut

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
