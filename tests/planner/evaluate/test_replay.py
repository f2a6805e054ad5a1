"""The replay against tokens walked by hand, ways to the same tally, samples counted, and what is refused.

`certify/test_naive.py` holds the twin of both.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan.errors import UsageError
from moeplan.planner.evaluate import replay as replay_module
from moeplan.planner.evaluate.chunks import Cut, Cuts
from moeplan.planner.evaluate.evaluate import evaluate
from moeplan.planner.evaluate.journey import Contender, Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Passes
from moeplan.planner.evaluate.tally import COUNTS
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.planner.evaluate.units import SampleIndex, index_samples
from moeplan.profilers.cluster import Cluster
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.schema import TokenBatch
from tests.builders import model
from tests.planner.makers import counted, scene_of, stored_tokens

HALVES = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)
PAIRS = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8)
REPLICATED = Placement.from_sets([[[0, 1, 2], [2, 3, 4], [4, 5, 6], [0, 6, 7]]] * 3, 8, ReplicaRule.EVEN)


@pytest.mark.parametrize(
    ("ids", "placement", "cluster", "dispatch", "expected"),
    [  # a token at device 0; device_copies, hops, hops_kept, far_copies, node_copies
        ([[5, 1], [2, 3], [6, 7]], HALVES, "1x2", "standard", (4, 2, 0, 0, 0)),  # to device 1 and back, twice
        ([[5, 1], [2, 3], [6, 7]], HALVES, "1x2", "coherent", (4, 2, 0, 0, 0)),  # to 1, its other part too; to 0; to 1
        ([[4, 6], [0, 1], [0, 2]], PAIRS, "2x2", "standard", (6, 2, 1, 4, 2)),  # two far copies, of one remote node
    ],
)
def test_one_token_by_hand(
    tmp_path: Path, ids: Any, placement: Placement, cluster: str, dispatch: Any, expected: tuple[int, ...]
) -> None:
    nothing = np.zeros(1, np.int8)
    token = TokenBatch(None, nothing.astype(int), nothing.astype(np.int32), None, nothing, np.array([ids], np.uint16))
    ((tally,),) = replay(scene_of(stored_tokens(tmp_path, model(), token), cluster), [Journey(dispatch, placement)])
    counts = dict(zip(COUNTS, tally.counts.sum(axis=0).tolist(), strict=True))
    names = ("device_copies", "hops", "hops_kept", "far_copies", "node_copies")
    assert tuple(counts[name] for name in names) == expected


def test_a_device_without_slots_does_not_count_as_idle(make_trace: Any) -> None:
    trace, idle = make_trace(samples=8), Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7], []]] * 3, 8)
    judged = [
        evaluate(scene_of(trace, cluster), [Contender("plan", Journey("standard", placement))]).judged
        for cluster, placement in (("1x3", idle), ("1x2", HALVES))
    ]
    three, two = (one["plan/standard"].value["balance"] for one in judged)
    assert three == two


def test_layers_in_chunks_share_the_walk_of_whole_ones_and_other_placements_have_their_own(
    make_trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked, plain = list[Any](), replay_module._Walker

    def noted(journey: Journey, cluster: Any) -> Any:
        walked.append(journey)
        return plain(journey, cluster)

    monkeypatch.setattr(replay_module, "_Walker", noted)
    whole = Journey("standard", PAIRS)
    chunked = dataclasses.replace(whole, cuts=Cuts(Cut.equal(4, 3), None), capacity_factor=1.5)
    others = [Journey("coherent", PAIRS), dataclasses.replace(whole, replica_rule="nearest")]
    ((one, same, *_),) = replay(scene_of(make_trace(), "2x2"), [whole, chunked, *others])
    assert one is same
    assert walked == [chunked, *others]  # the walk of the one that counts more


@pytest.mark.parametrize("dispatch", ["standard", "coherent"])
def test_a_whole_step_takes_as_long_beside_chunks_as_alone(make_trace: Any, make_profile: Any, dispatch: Any) -> None:
    trace, profile = make_trace(samples=24), make_profile("2x2")
    plain, beside = (
        evaluate(scene_of(trace, "2x2", profile=profile, passes=passes), [Contender("plan", Journey(dispatch, PAIRS))])
        for passes in (None, Passes(0.0, full_duplex=False))
    )
    (alone,), (chunk,) = plain.judged.values(), beside.judged.values()
    assert alone.value["step_s"] == pytest.approx(chunk.value["step_s"], rel=1e-12)
    assert {**chunk.value, **alone.value} == pytest.approx(chunk.value, rel=1e-12)
    assert chunk.value.keys() - alone.value.keys() == {"moe_s"}


@pytest.mark.parametrize(
    ("num_steps", "ports", "words"),
    [
        (2**15, False, "loads: 32,768 steps x 1 layers x 8,192 devices are 268,435,456 numbers; expected at most"),
        (2**13, True, "copies for seconds: 8,192 steps .* x 2 classes x 2 directions x 2 exchanges are 536,870,912"),
    ],
)
def test_what_would_not_fit_is_refused_by_its_own_factors_before_it_takes_memory(
    make_trace: Any, num_steps: int, ports: bool, words: str
) -> None:
    scene = scene_of(make_trace(samples=2, layers=1), "2x4096", each=1)
    steps = np.array([0, num_steps - 1])
    huge = dataclasses.replace(scene, cohorts=[dataclasses.replace(scene.cohorts[0], step=steps, blocks=None)])
    placement = Placement(np.arange(8, dtype=np.int32)[None], np.array([8] + [0] * 8191), 8)
    with pytest.raises(UsageError, match=words):
        replay(huge, [Journey("coherent", placement)], ports=ports)


def samples_of(trace: Any) -> tuple[SampleIndex, SampleCounts]:
    index = index_samples(trace)
    return index, SampleCounts(trace, index, np.ones(len(index.sample), bool), Cluster(2, 2))


def test_the_count_form_has_the_same_samples_and_pairs(make_trace: Any, tmp_path: Path) -> None:
    trace = make_trace(samples=8, tokens=5, columns=("sample", "step", "source_rank"), ranks=3)
    (one, by_token), (other, by_count) = samples_of(trace), samples_of(counted(trace, tmp_path))
    for name in ("sample", "step", "rank", "unit_tokens", "contexts"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(by_token.under(PAIRS).pairs, by_count.under(PAIRS).copies)
    np.testing.assert_array_equal(by_token.experts, by_count.experts)
    np.testing.assert_array_equal(one.contexts, one.unit_tokens**2)  # positions from 0 on


def test_samples_in_several_steps_are_not_torn() -> None:
    twice = SampleIndex(np.tile([1, 2, 3, 4], 2), np.repeat([0, 1], 4), None, np.ones(8, int), np.ones(8, int))
    assert twice.split_kind == "sample"
    np.testing.assert_array_equal(*twice.fitted(seed=3, fraction=0.5).reshape(2, 4))


def test_placements_are_counted_in_one_pass_and_once(make_trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, counts = samples_of(make_trace())
    passes, plain = list[Any](), SampleIndex.batches

    def noted(*given: Any) -> Any:
        passes.append("pass")
        return plain(*given)

    monkeypatch.setattr(SampleIndex, "batches", noted)
    in_order, replicated = PAIRS, REPLICATED
    both = counts.count({"one": in_order, "other": replicated})
    assert [counts.under(one) for one in (in_order, replicated)] == both
    assert passes == ["pass"]


def test_what_has_no_samples_or_moves_with_them_is_refused_by_name(make_trace: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples were not recorded"):
        index_samples(make_trace(columns=()))
    trace = make_trace()
    counts = counted(trace, tmp_path / "counts")
    with pytest.raises(UsageError, match="leave --phase out"):
        index_samples(counts, phases=("decode",))
    nearest = dataclasses.replace(REPLICATED, replica_rule=ReplicaRule.NEAREST)
    for source, placement, message in ((trace, nearest, "rule nearest"), (counts, REPLICATED, "counts do not say")):
        with pytest.raises(UsageError, match=message):
            samples_of(source)[1].under(placement)
