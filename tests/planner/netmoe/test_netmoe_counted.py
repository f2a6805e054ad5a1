"""Samples of a trace, counted: a token-by-token twin, the count form beside the token form, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import InputError, UsageError
from moeplan.planner.netmoe.counted import SampleTraffic, count_samples
from moeplan.planner.netmoe.roll import Roll, call_roll
from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.count_form import read_counts, tabulate, write_counts
from moeplan.traces.reader import Trace
from moeplan.traces.schema import TraceMeta

MakeTrace = Callable[..., Trace]
CLUSTER = Cluster(2, 2)


def counts_of(trace: Trace, folder: Path) -> str:
    """The same trace in count form."""
    meta = TraceMeta(form="counts", model=trace.model, recorder="test")
    write_counts(folder / "counts", meta, tabulate(trace))
    return str(folder / "counts")


def traffic_of(trace: Trace, placement: Placement, cluster: Cluster = CLUSTER) -> tuple[Roll, SampleTraffic]:
    roll = call_roll(trace)
    fitted_I = np.arange(len(roll.sample)) % 2 == 0
    counted = count_samples(trace, roll, fitted_I, {"plan": placement}, cluster)
    return roll, counted.traffic["plan"]


@pytest.mark.parametrize(("columns", "slots"), [(("sample",), None), (("sample", "step"), None), (("sample",), 3)])
def test_what_samples_send_is_what_their_tokens_send_one_by_one(
    make_trace: MakeTrace, columns: tuple[str, ...], slots: int | None
) -> None:
    trace = make_trace(samples=9, tokens=6, columns=columns, unrouted=0.1)
    placement = contiguous.solve(3, 8, CLUSTER, slots=slots).placement
    roll, found = traffic_of(trace, placement)
    copies, nodes, pairs, linked = (np.zeros_like(x) for x in (found.copies, found.nodes, found.pairs, found.linked))
    for batch in trace.batches():
        assert batch.sample is not None
        for t in range(len(batch)):
            at = int(np.flatnonzero(roll.sample == batch.sample[t])[0])
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
    found = {}
    for source in (trace, counts):
        roll = call_roll(source)
        everybody = np.ones(len(roll.sample), bool)
        found[source.form] = roll, count_samples(source, roll, everybody, {"plan": placement}, CLUSTER)
    (one, by_token), (other, by_count) = found["tokens"], found["counts"]
    for name in ("sample", "step", "rank", "tokens"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(other.contexts, one.tokens**2)  # positions from 0 on, as recorded here
    np.testing.assert_array_equal(one.contexts, other.contexts)
    np.testing.assert_array_equal(by_token.experts, by_count.experts)
    np.testing.assert_array_equal(by_token.traffic["plan"].pairs, by_count.traffic["plan"].copies)


def test_recorded_steps_are_held_out_whole_and_samples_in_several_steps_are_not_torn(make_trace: MakeTrace) -> None:
    roll = call_roll(make_trace(samples=40, columns=("sample", "step")))
    fitted_I = roll.fitted(seed=0, fraction=0.5)
    assert roll.unit == "step"
    assert roll.step is not None
    assert all(len(set(fitted_I[roll.step == step])) == 1 for step in np.unique(roll.step))
    twice = Roll(np.tile([1, 2, 3, 4], 2), np.repeat([0, 1], 4), None, np.ones(8, int), np.ones(8, int))
    assert twice.unit == "sample"
    halves = twice.fitted(seed=3, fraction=0.5).reshape(2, 4)
    np.testing.assert_array_equal(*halves)


def test_samples_start_on_their_source_ranks_only_where_there_are_as_many_as_devices(make_trace: MakeTrace) -> None:
    roll = call_roll(make_trace(samples=12, columns=("sample", "source_rank"), ranks=4))
    everybody = np.arange(12)
    assert roll.rank is not None
    found = roll.cohort(everybody, num_devices=4, samples_per_step=8)
    np.testing.assert_array_equal(found.home, roll.rank)
    assert (found.num_steps, found.dropped) == (1, 4)
    assert found.step is not None
    assert found.step.tolist() == [0] * 8 + [-1] * 4
    other = roll.cohort(everybody, num_devices=2, samples_per_step=8)
    np.testing.assert_array_equal(other.home, everybody % 2)


def test_what_has_no_samples_or_moves_with_them_is_refused_by_name(make_trace: MakeTrace, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples were not recorded"):
        call_roll(make_trace(columns=()))
    trace = make_trace()
    counts = read_counts(counts_of(trace, tmp_path))
    with pytest.raises(UsageError, match="leave --phase out"):
        call_roll(counts, phases=("decode",))
    replicated = contiguous.solve(3, 8, CLUSTER, slots=3).placement
    nearest = Placement(replicated.physical_to_logical, replicated.slots, 8, ReplicaRule.NEAREST)
    for source, placement, message in ((trace, nearest, "rule nearest"), (counts, replicated, "counts do not say")):
        roll = call_roll(source)
        with pytest.raises(UsageError, match=message):
            count_samples(source, roll, roll.tokens > 0, {"plan": placement}, CLUSTER)
    with pytest.raises(InputError, match="expected some of both"):
        call_roll(trace).fitted(seed=0, fraction=1e-9)
