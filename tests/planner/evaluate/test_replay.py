"""The replay against tokens walked by hand, and ways to the same tally; `certify/test_naive.py` holds its twin."""

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
from moeplan.planner.evaluate.splits import index_units
from moeplan.planner.evaluate.tally import COUNTS, Tally
from moeplan.solvers.placement import Placement
from moeplan.traces.schema import TokenBatch
from tests.builders import model
from tests.planner.makers import scene_of, stored_tokens

HALVES = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)
PAIRS = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8)


def tally_of(trace: Any, placement: Placement, cluster: str, dispatch: Any, **settings: Any) -> Tally:
    """The only tally of a trace."""
    return replay(scene_of(trace, cluster, **settings), [Journey(dispatch, placement)], ports=True)[0][0]


def sums_of(tally: Tally) -> dict[str, int]:
    """The counts of all units."""
    return dict(zip(COUNTS, tally.counts.sum(axis=0).tolist(), strict=True))


def routed(folder: Path, ids: list[list[int]]) -> Any:
    """A trace of one token with these experts."""
    nothing = np.zeros(1, np.int8)
    token = TokenBatch(None, nothing.astype(int), nothing.astype(np.int32), None, nothing, np.array([ids], np.uint16))
    return stored_tokens(folder, model(), token)


def test_one_token_by_hand_in_standard_and_coherent(tmp_path: Path) -> None:
    """Experts 0-3 on device 0, 4-7 on device 1; a token at device 0 picks (5, 1), then (2, 3), then (6, 7)."""
    trace = routed(tmp_path, [[5, 1], [2, 3], [6, 7]])
    counts = {name: sums_of(tally_of(trace, HALVES, "1x2", name)) for name in ("standard", "coherent")}
    # standard: out and back to device 1 in layers 0 and 2
    assert counts["standard"]["device_copies"] == 4
    # coherent: layer 0 out to 1, and device 0's part follows to the new home 1; layer 1 to 0; layer 2 to 1
    assert counts["coherent"]["device_copies"] == 4
    assert counts["coherent"]["hops_kept"] == counts["standard"]["hops_kept"] == 0
    assert counts["coherent"]["hops"] == 2


def test_copies_to_another_node_count_once_a_device_and_once_a_node(tmp_path: Path) -> None:
    """A token at device 0 of 2x2 picks experts on devices 2 and 3: two far copies each way, one remote node."""
    counts = sums_of(tally_of(routed(tmp_path, [[4, 6], [0, 1], [0, 2]]), PAIRS, "2x2", "standard"))
    assert (counts["device_copies"], counts["far_copies"], counts["node_copies"]) == (6, 4, 2)


def test_an_incomplete_last_step_is_left_out_of_loads_and_counted(make_trace: Any) -> None:
    scene = scene_of(make_trace(samples=11, tokens=5), "1x2")
    (cohort,), ((tally,),) = scene.cohorts, replay(scene, [Journey("standard", HALVES)])
    assert (cohort.num_steps, cohort.dropped) == (2, 3)
    assert tally.loads.sum() == 8 * 5 * 3 * 2
    assert cohort.tokens_per_step == 20


@pytest.mark.parametrize("ranks", [2, 3])
def test_recorded_source_ranks_are_homes_only_where_the_recording_had_as_many_ranks(
    make_trace: Any, ranks: int
) -> None:
    trace = make_trace(samples=6, columns=("sample", "source_rank"), ranks=ranks)
    assert (scene_of(trace, "1x2", each=8).cohorts[0].home is None) == (ranks == 2)


def test_a_cohort_has_only_the_recorded_steps_of_its_own_units(make_trace: Any) -> None:
    index = index_units(make_trace(samples=12, tokens=5, columns=("step",)))
    assert index.unit_ids.tolist() == [0, 1, 2, 3]  # three samples of five tokens a step
    cohort = index.cohort(np.array([True, False, True, False]), num_devices=2, samples_per_step=8)
    assert (cohort.num_steps, cohort.num_tokens, cohort.tokens_per_step) == (2, 30, 15)


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
def test_a_whole_step_takes_as_long_beside_one_in_chunks_as_alone(
    make_trace: Any, make_profile: Any, dispatch: Any
) -> None:
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
    huge = dataclasses.replace(scene, cohorts=[dataclasses.replace(scene.cohorts[0], step=steps)])
    placement = Placement(np.arange(8, dtype=np.int32)[None], np.array([8] + [0] * 8191), 8)
    with pytest.raises(UsageError, match=words):
        replay(huge, [Journey("coherent", placement)], ports=ports)
