"""Which samples and tokens are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.traces.recording.kept import Kept, sampled
from moeplan.traces.split import fitted, mixed


def share(sample: int) -> float:
    """The hash of a sample over 2^64, in plain integers."""
    return int(mixed(np.array([sample]))[0]) / 2**64


@given(st.lists(st.integers(0, 2**62), max_size=20), st.floats(0.01, 0.99))
def test_a_sample_is_kept_by_the_hash_of_its_id_alone(samples: list[int], rate: float) -> None:
    assert sampled(np.array(samples, np.int64), rate).tolist() == [share(sample) < rate for sample in samples]


def test_the_share_is_about_the_rate_and_tells_nothing_of_the_split() -> None:
    ids = np.concatenate([(rank << 40) + np.arange(5000) for rank in range(4)])
    kept = sampled(ids, 0.3)
    assert kept.mean() == pytest.approx(0.3, abs=0.02)
    assert fitted(ids[kept], seed=0, fraction=0.5).mean() == pytest.approx(0.5, abs=0.03)


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)), max_size=12),
    st.sampled_from([0.3, 1.0]),
    st.one_of(st.none(), st.integers(1, 8)),
    st.integers(0, 9),
)
def test_rows_are_those_without_padding_of_kept_samples_up_to_the_bound(
    tokens: list[tuple[int, int]], rate: float, bound: int | None, before: int
) -> None:
    position = np.array([at for at, _ in tokens], np.int32)
    sample = np.array([name for _, name in tokens], np.int64)
    wanted = [row for row, (at, name) in enumerate(tokens) if at >= 0 and (rate == 1 or share(name) < rate)]
    if bound is not None:
        wanted = wanted[: max(0, bound - before)]
    kept = Kept(sample_rate=rate, max_tokens=bound)
    if not kept.full(before):
        rows = kept.rows(position, sample, before)
        assert list(range(len(tokens)) if rows is None else rows) == wanted


def test_a_share_of_unnamed_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="needs sample ids"):
        Kept(sample_rate=0.5).rows(np.zeros(3, np.int32), None, 0)
