"""Samples of a trace, counted: the count form beside the token form, and what is refused; `certify/test_naive.py` holds
their twin.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, UsageError
from moeplan.planner.evaluate.splits import SampleIndex, index_samples
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous
from moeplan.solvers.placement import Placement, ReplicaRule
from tests.planner.makers import counted, planned

CLUSTER = Cluster(2, 2)


def placed(slots: int | None = None) -> Placement:
    """Experts in order, with replicas where there are more slots."""
    return contiguous.solve(3, 8, CLUSTER, slots=slots).placement


def samples_of(trace: Any) -> tuple[SampleIndex, SampleCounts]:
    index = index_samples(trace)
    return index, SampleCounts(trace, index, np.ones(len(index.sample), bool), CLUSTER)


@settings(max_examples=8)
@given(seed=st.integers(0, 99), columns=st.sets(st.sampled_from(["step", "source_rank"])))
def test_the_count_form_has_the_same_samples_and_pairs(
    make_trace: Any, tmp_path_factory: Any, seed: int, columns: set[str]
) -> None:
    trace = make_trace(samples=8, tokens=5, seed=seed, columns=("sample", *sorted(columns)), ranks=3)
    counts = counted(trace, tmp_path_factory.mktemp("form"))
    (one, by_token), (other, by_count) = samples_of(trace), samples_of(counts)
    for name in ("sample", "step", "rank", "unit_tokens", "contexts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(other.contexts, one.unit_tokens**2)  # positions from 0 on, as recorded here
    np.testing.assert_array_equal(by_token.under(placed()).pairs, by_count.under(placed()).copies)
    np.testing.assert_array_equal(by_token.experts, by_count.experts)


def test_placements_are_counted_in_one_pass_and_once(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, counts = samples_of(make_trace())
    passes, plain = list[Any](), SampleIndex.batches

    def noted(*given: Any) -> Any:
        passes.append("pass")
        return plain(*given)

    monkeypatch.setattr(SampleIndex, "batches", noted)
    in_order, replicated = placed(), placed(3)
    both = counts.count({"one": in_order, "other": replicated})
    assert [counts.under(one) for one in (in_order, replicated)] == both
    assert passes == ["pass"]


def test_recorded_steps_are_held_out_whole_and_samples_in_several_steps_are_not_torn(make_trace: Any) -> None:
    index = index_samples(make_trace(samples=40, columns=("sample", "step")))
    fitted_I, step_I = index.fitted(seed=0, fraction=0.5), np.asarray(index.step)
    assert index.split_kind == "step"
    assert all(len(set(fitted_I[step_I == step])) == 1 for step in np.unique(step_I))
    twice = SampleIndex(np.tile([1, 2, 3, 4], 2), np.repeat([0, 1], 4), None, np.ones(8, int), np.ones(8, int))
    assert twice.split_kind == "sample"
    halves = twice.fitted(seed=3, fraction=0.5).reshape(2, 4)
    np.testing.assert_array_equal(*halves)


def test_samples_start_on_their_source_ranks_only_where_there_are_as_many_as_devices(make_trace: Any) -> None:
    index = index_samples(make_trace(samples=12, columns=("sample", "source_rank"), ranks=4))
    four, two = (index.cohort(np.ones(12, bool), num_devices=size, samples_per_step=8) for size in (4, 2))
    np.testing.assert_array_equal(four.home, index.rank)
    assert (four.num_steps, four.dropped) == (1, 4)
    assert np.asarray(four.step).tolist() == [0] * 8 + [-1] * 4
    np.testing.assert_array_equal(two.home, np.arange(12) % 2)


def test_what_has_no_samples_or_moves_with_them_is_refused_by_name(make_trace: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples were not recorded"):
        index_samples(make_trace(columns=()))
    trace = make_trace()
    counts = counted(trace, tmp_path / "counts")
    with pytest.raises(UsageError, match="leave --phase out"):
        index_samples(counts, phases=("decode",))
    replicated = placed(3)
    nearest = Placement(replicated.physical_to_logical, replicated.slots, 8, ReplicaRule.NEAREST)
    for source, placement, message in ((trace, nearest, "rule nearest"), (counts, replicated, "counts do not say")):
        with pytest.raises(UsageError, match=message):
            samples_of(source)[1].under(placement)
    with pytest.raises(InputError, match="expected some of both"):
        planned(trace, "netmoe", fit_fraction=1e-9)
