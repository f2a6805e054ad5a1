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
from moeplan.planner.evaluate.homes import Staying
from moeplan.planner.evaluate.journey import Contender, Journey
from moeplan.planner.evaluate.price import price
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Passes
from moeplan.planner.evaluate.splits import index_units
from moeplan.planner.evaluate.tally import COUNTS, Tally
from moeplan.solvers.placement import Placement, ReplicaRule
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
    token = TokenBatch(
        step=None,
        sample=np.zeros(1, np.int64),
        position=np.zeros(1, np.int32),
        source_rank=None,
        phase=np.zeros(1, np.int8),
        ids=np.array([ids], np.uint16),
    )
    return stored_tokens(folder, model(), token)


def trace_ids(trace: Any) -> Any:
    return np.concatenate([batch.ids for batch in trace.batches()])


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


def test_top_1_coherent_moves_a_token_once_a_layer_and_standard_twice(make_trace: Any) -> None:
    trace = make_trace(samples=8, tokens=20, top_k=1)
    sums = sums_of(tally_of(trace, HALVES, "1x2", "coherent"))
    first_hop = (trace_ids(trace)[:, 0, 0] // 4 != np.repeat(np.arange(8) % 2, 20)).sum()
    assert sums["device_copies"] == sums["hops"] - sums["hops_kept"] + first_hop


def test_relabelling_the_devices_of_a_node_keeps_hops_and_swaps_loads(make_trace: Any) -> None:
    trace, even, odd = make_trace(samples=20), [0, 2, 4, 6], [1, 3, 5, 7]
    one, other = (
        tally_of(trace, Placement.from_sets([held] * 3, 8), "1x2", "coherent", fraction=0.5)
        for held in ([even, odd], [odd, even])
    )
    np.testing.assert_array_equal(one.counts[:, 1:4], other.counts[:, 1:4])
    np.testing.assert_array_equal(one.loads, other.loads[:, :, ::-1])


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
    found = index_units(make_trace(samples=12, tokens=5, columns=("step",)))
    assert found.unit_ids.tolist() == [0, 1, 2, 3]  # three samples of five tokens a step
    cohort = found.cohort(np.array([True, False, True, False]), num_devices=2, samples_per_step=8)
    assert (cohort.num_steps, cohort.num_tokens, cohort.tokens_per_step) == (2, 30, 15)


def test_a_device_without_slots_does_not_count_as_idle(make_trace: Any) -> None:
    trace, idle = make_trace(samples=8), Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7], []]] * 3, 8)
    found = [
        evaluate(scene_of(trace, cluster), [Contender("plan", Journey("standard", placement))]).judged
        for cluster, placement in (("1x3", idle), ("1x2", HALVES))
    ]
    three, two = (one["plan/standard"].value["balance"] for one in found)
    assert three == two


@pytest.mark.parametrize("dispatch", ["standard", "coherent"])
def test_ports_are_those_of_tokens_walked_one_by_one(make_trace: Any, dispatch: Any) -> None:
    """Experts 2d and 2d+1 on device d of 2x2; every token walked in Python."""
    trace = make_trace(samples=9, tokens=7, unrouted=0.2, seed=3)
    tally = tally_of(trace, PAIRS, "2x2", dispatch)
    (out, back), (tokens, contexts, pairs) = np.zeros((2, 2, 3, 2, 2, 4), int), np.zeros((3, 2, 3, 4), int)
    for row, ids in enumerate(trace_ids(trace).tolist()):
        sample, position = divmod(row, 7)
        step, here = sample // 4, sample % 4
        if step >= 2:
            continue
        for layer in range(3):
            devices = [expert // 2 for expert in ids[layer] if expert != 65_535]
            after = devices[0] if devices and dispatch == "coherent" else here
            tokens[step, layer, here] += 1
            contexts[step, layer, here] += 2 * position + 1
            for device in devices:
                pairs[step, layer, device] += 1
            for device in set(devices):
                if device != here:
                    out[step, layer, int(device // 2 != here // 2), 0, here] += 1
                    out[step, layer, int(device // 2 != here // 2), 1, device] += 1
                if device != after:
                    back[step, layer, int(device // 2 != after // 2), 0, device] += 1
                    back[step, layer, int(device // 2 != after // 2), 1, after] += 1
            here = after
    assert tally.ports is not None
    np.testing.assert_array_equal(tally.loads, pairs)
    np.testing.assert_array_equal(tally.ports.dispatch, out)
    np.testing.assert_array_equal(tally.ports.combine, back)
    np.testing.assert_array_equal(np.broadcast_to(tally.ports.tokens, tokens.shape), tokens)
    np.testing.assert_array_equal(np.broadcast_to(tally.ports.contexts, contexts.shape), contexts)


def in_several_steps(trace: Any, folder: Path) -> Any:
    """Tokens by turns in four steps, so that every sample is in each of them."""
    steps = (dataclasses.replace(batch, step=(batch.position % 4).astype(np.int32)) for batch in trace.batches())
    return stored_tokens(folder, trace.model, *steps)


@pytest.mark.parametrize("columns", [("sample",), ("sample", "step", "source_rank"), ()])
@pytest.mark.parametrize("cluster", ["2x2", "1x4"])
def test_samples_that_stay_give_by_their_counts_what_their_tokens_give_walked(
    make_trace: Any, make_profile: Any, tmp_path: Path, columns: tuple[str, ...], cluster: str
) -> None:
    """Without columns: recorded steps, every sample in all of them."""
    trace = make_trace(samples=41, tokens=12, unrouted=0.1, columns=columns or ("sample",), ranks=4)
    trace = trace if columns else in_several_steps(trace, tmp_path / "trace")
    scene = scene_of(trace, cluster, profile=make_profile(cluster), moving=True, each=8)
    (cohort,), staying = scene.cohorts, Staying()
    for placement in (PAIRS, Placement.from_sets([[[0, 1, 4], [2, 3], [4, 5], [0, 6, 7]]] * 3, 8, ReplicaRule.EVEN)):
        assert scene.samples is not None
        moves_LI = np.zeros((4, len(scene.index.unit_tokens)), np.int64)
        moves_LI[:, cohort.unit_ids] = staying(scene.samples, placement, cohort).device
        walked = Journey("standard", placement)
        counted = dataclasses.replace(walked, moves=moves_LI)
        ((one, other),) = replay(scene, [walked, counted], ports=True, between=True)
        for name in ("tokens", "device_copies", "node_copies", "far_copies"):
            column = COUNTS.index(name)
            np.testing.assert_array_equal(one.counts[:, column], other.counts[:, column], err_msg=name)
        np.testing.assert_array_equal(one.loads, other.loads)
        np.testing.assert_array_equal(one.between, other.between)
        seconds = [price(tally, walked, scene).levels for tally in (one, other)]
        assert seconds[0].keys() == seconds[1].keys() >= {"step_s", "attention_s", "dispatch_s"}
        for name, levels_QB in seconds[0].items():
            np.testing.assert_allclose(levels_QB, seconds[1][name], rtol=1e-12, err_msg=name)


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
        (
            2**13,
            True,
            "copies for seconds: 8,192 steps x 1 layers x 8,192 devices x 2 classes x 2 directions x 2 exchanges are"
            " 536,870,912 numbers; expected at most",
        ),
    ],
    ids=["loads", "ports"],
)
def test_what_would_not_fit_is_refused_by_its_own_factors_before_it_takes_memory(
    make_trace: Any, num_steps: int, ports: bool, words: str
) -> None:
    scene = scene_of(make_trace(samples=2, layers=1), "2x4096", each=1)
    huge = dataclasses.replace(
        scene, cohorts=[dataclasses.replace(scene.cohorts[0], step=np.array([0, num_steps - 1]))]
    )
    slots = np.zeros(8192, int)
    slots[0] = 8
    placement = Placement(np.arange(8, dtype=np.int32)[None], slots, 8)
    with pytest.raises(UsageError, match=words):
        replay(huge, [Journey("coherent", placement)], ports=ports)
