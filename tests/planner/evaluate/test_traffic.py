"""Samples of a trace, counted: a token-by-token twin, the count form beside the token form, and what is refused."""

from collections.abc import Callable
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
from moeplan.traces.count_form import read_counts, tabulate, write_counts
from moeplan.traces.reader import Trace
from tests.builders import meta_of
from tests.planner.makers import solved

MakeTrace = Callable[..., Trace]
CLUSTER = Cluster(2, 2)


def counts_of(trace: Trace, folder: Path) -> str:
    """The same trace in count form."""
    write_counts(folder / "counts", meta_of(trace.model, form="counts"), tabulate(trace))
    return str(folder / "counts")


def counted(trace: Any, *, fitted: int = 1) -> tuple[SampleIndex, SampleCounts]:
    """The samples of a trace, of which every so many is fitted."""
    index = index_samples(trace)
    return index, SampleCounts(trace, index, np.arange(len(index.sample)) % fitted == 0, CLUSTER)


@pytest.mark.parametrize(("columns", "slots"), [(("sample",), None), (("sample", "step"), None), (("sample",), 3)])
def test_what_samples_send_is_what_their_tokens_send_one_by_one(
    make_trace: MakeTrace, columns: tuple[str, ...], slots: int | None
) -> None:
    trace = make_trace(samples=9, tokens=6, columns=columns, unrouted=0.1)
    placement = contiguous.solve(3, 8, CLUSTER, slots=slots).placement
    index, counts = counted(trace, fitted=2)
    found = counts.under(placement)
    copies, nodes, pairs, linked = (np.zeros_like(x) for x in (found.copies, found.nodes, found.pairs, found.linked))
    for batch in trace.batches():
        assert batch.sample is not None
        for t in range(len(batch)):
            at = int(np.flatnonzero(index.sample == batch.sample[t])[0])
            turn = int(batch.sample[t] + batch.position[t])
            before: list[int] = []
            for layer in range(3):
                ids = [int(e) for e in batch.ids[t, layer] if e < 8]
                holders = [np.flatnonzero(placement.holds(layer)[e]) for e in ids]
                devices = [int(held[turn % len(held)]) for held in holders]
                for device in devices:
                    pairs[at, layer, device] += 1
                for device in set(devices):
                    copies[at, layer, device] += 1
                    for expert in before if at % 2 == 0 else []:
                        linked[layer - 1, expert, device] += 1
                for node in {device // 2 for device in devices}:
                    nodes[at, layer, node] += 1
                before = ids
    np.testing.assert_array_equal(found.copies, copies)
    np.testing.assert_array_equal(found.nodes, nodes)
    np.testing.assert_array_equal(found.pairs, pairs)
    np.testing.assert_array_equal(found.linked, linked)


@settings(max_examples=8)
@given(seed=st.integers(0, 99), columns=st.sets(st.sampled_from(["step", "source_rank"])))
def test_the_count_form_has_the_same_samples_and_pairs(
    make_trace: MakeTrace, tmp_path_factory: pytest.TempPathFactory, seed: int, columns: set[str]
) -> None:
    trace = make_trace(samples=8, tokens=5, seed=seed, columns=("sample", *sorted(columns)), ranks=3)
    counts = read_counts(counts_of(trace, tmp_path_factory.mktemp("form")))
    placement = contiguous.solve(3, 8, CLUSTER).placement
    (one, by_token), (other, by_count) = counted(trace), counted(counts)
    for name in ("sample", "step", "rank", "unit_tokens", "contexts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(other.contexts, one.unit_tokens**2)  # positions from 0 on, as recorded here
    np.testing.assert_array_equal(by_token.under(placement).pairs, by_count.under(placement).copies)
    np.testing.assert_array_equal(by_token.experts, by_count.experts)


def test_placements_are_counted_in_one_pass_and_once(make_trace: MakeTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    _, counts = counted(make_trace())
    passes, plain = list[Any](), SampleIndex.batches

    def noted(*given: Any) -> Any:
        passes.append("pass")
        return plain(*given)

    monkeypatch.setattr(SampleIndex, "batches", noted)
    in_order, replicated = (contiguous.solve(3, 8, CLUSTER, slots=slots).placement for slots in (None, 3))
    both = counts.count({"one": in_order, "other": replicated})
    assert [counts.under(one) for one in (in_order, replicated)] == both
    assert passes == ["pass"]


def test_recorded_steps_are_held_out_whole_and_samples_in_several_steps_are_not_torn(make_trace: MakeTrace) -> None:
    index = index_samples(make_trace(samples=40, columns=("sample", "step")))
    fitted_I = index.fitted(seed=0, fraction=0.5)
    assert index.split_kind == "step"
    assert index.step is not None
    assert all(len(set(fitted_I[index.step == step])) == 1 for step in np.unique(index.step))
    twice = SampleIndex(np.tile([1, 2, 3, 4], 2), np.repeat([0, 1], 4), None, np.ones(8, int), np.ones(8, int))
    assert twice.split_kind == "sample"
    halves = twice.fitted(seed=3, fraction=0.5).reshape(2, 4)
    np.testing.assert_array_equal(*halves)


def test_samples_start_on_their_source_ranks_only_where_there_are_as_many_as_devices(make_trace: MakeTrace) -> None:
    index = index_samples(make_trace(samples=12, columns=("sample", "source_rank"), ranks=4))
    everybody = np.ones(12, bool)
    assert index.rank is not None
    found = index.cohort(everybody, num_devices=4, samples_per_step=8)
    np.testing.assert_array_equal(found.home, index.rank)
    assert (found.num_steps, found.dropped) == (1, 4)
    assert found.step is not None
    assert found.step.tolist() == [0] * 8 + [-1] * 4
    other = index.cohort(everybody, num_devices=2, samples_per_step=8)
    np.testing.assert_array_equal(other.home, np.arange(12) % 2)


def test_what_has_no_samples_or_moves_with_them_is_refused_by_name(make_trace: MakeTrace, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples were not recorded"):
        index_samples(make_trace(columns=()))
    trace = make_trace()
    counts = read_counts(counts_of(trace, tmp_path))
    with pytest.raises(UsageError, match="leave --phase out"):
        index_samples(counts, phases=("decode",))
    replicated = contiguous.solve(3, 8, CLUSTER, slots=3).placement
    nearest = Placement(replicated.physical_to_logical, replicated.slots, 8, ReplicaRule.NEAREST)
    for source, placement, message in ((trace, nearest, "rule nearest"), (counts, replicated, "counts do not say")):
        with pytest.raises(UsageError, match=message):
            counted(source)[1].under(placement)
    with pytest.raises(InputError, match="expected some of both"):
        solved(trace, fit_fraction=1e-9)
