import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import UsageError
from moeplan.planner.certify.recount import Ledger, Residence, recount
from moeplan.planner.certify.roster import enroll, tokens_of
from moeplan.planner.measures.replay import replay
from moeplan.planner.measures.survey import Cohort, survey
from moeplan.planner.measures.tally import COUNTS, Route, Tally
from moeplan.profilers.cluster import Cluster
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.solvers.ports import link_classes


def random_placement(rng: np.random.Generator, layers: int, experts: int, slots: Any, rule: ReplicaRule) -> Placement:
    """Any legal placement: slots differ by device, experts are replicated at random."""
    while True:
        held = [[rng.choice(experts, size=s, replace=False).tolist() for s in slots] for _ in range(layers)]
        if all(set().union(*map(set, layer)) == set(range(experts)) for layer in held):
            return Placement.from_sets(held, experts, rule)


def holders(placement: Placement) -> list[list[list[int]]]:
    return [[np.flatnonzero(row).tolist() for row in placement.holds(layer)] for layer in range(placement.num_layers)]


def both(
    trace: Any,
    placement: Placement,
    cluster: Cluster,
    dispatch: Any,
    *,
    fraction: float = 0.5,
    samples_per_step: int = 4,
) -> tuple[Tally, Ledger, Cohort]:
    found = survey(trace)
    part = found.cohort(
        found.fitted(seed=3, fraction=fraction), num_devices=cluster.num_devices, samples_per_step=samples_per_step
    )
    tally = replay(trace, [part], [Route("plan", dispatch, placement)], cluster, ports=True)[0][0]
    roster = enroll(
        trace,
        seed=3,
        fraction=fraction,
        fit=True,
        num_devices=cluster.num_devices,
        samples_per_step=samples_per_step,
        phases=[],
    )
    layout = Residence(
        coherent=dispatch == "coherent",
        nearest=placement.replica_rule == "nearest",
        holders=holders(placement),
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
    )
    ledgers = recount(tokens_of(trace, roster, []), roster, placement.num_layers, {"plan": layout}, timed=True)
    return tally, ledgers["plan"], part


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    rule=st.sampled_from(ReplicaRule),
    dispatch=st.sampled_from(["standard", "coherent"]),
    cluster=st.sampled_from(["1x2", "2x2", "3x1", "2x3"]),
    columns=st.sampled_from([("sample",), ("sample", "step"), ("step",), (), ("sample", "source_rank")]),
    top_k=st.integers(1, 3),
)
def test_replay_and_the_naive_recount_agree_on_every_count_and_load(
    make_trace: Any, seed: int, rule: ReplicaRule, dispatch: str, cluster: str, columns: Any, top_k: int
) -> None:
    where = Cluster.parse(cluster)
    trace = make_trace(
        samples=30, tokens=9, top_k=top_k, seed=seed, unrouted=0.1, columns=columns, ranks=where.num_devices
    )
    rng = np.random.default_rng(seed)
    slots = rng.integers(3, 8, size=where.num_devices)
    slots[0] = 8
    placement = random_placement(rng, 3, 8, slots, rule)
    tally, ledger, _ = both(trace, placement, where, dispatch, fraction=0.7)
    for column, name in enumerate(COUNTS):
        np.testing.assert_array_equal(tally.counts[:, column], ledger.sums[name], err_msg=name)
    np.testing.assert_array_equal(tally.loads, ledger.loads)
    assert tally.ports is not None
    assert ledger.moves is not None
    for phase, copies in enumerate((tally.ports.dispatch, tally.ports.combine)):
        for c, link in enumerate(link_classes(where)):
            np.testing.assert_array_equal(
                copies[:, :, c], ledger.moves.ports[phase, :, :, ["intra", "inter"].index(link)]
            )
    for kind, held in enumerate((tally.ports.tokens, tally.ports.contexts)):
        np.testing.assert_array_equal(np.broadcast_to(held, tally.loads.shape), ledger.moves.sitting[kind])


def test_one_token_by_hand_in_standard_and_coherent(make_trace: Any) -> None:
    """Experts 0-3 on device 0, 4-7 on device 1; a token at device 0 picks (5, 1), then (2, 3), then (6, 7)."""
    trace = make_trace(samples=1, tokens=1)
    trace = WithIds(trace, np.array([[[5, 1], [2, 3], [6, 7]]], dtype=np.uint16))
    placement = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)
    counts = {}
    for dispatch in ("standard", "coherent"):
        tally, *_ = both(trace, placement, Cluster.parse("1x2"), dispatch, fraction=1.0)
        counts[dispatch] = dict(zip(COUNTS, tally.counts[0].tolist(), strict=True))
    # standard: out and back to device 1 in layers 0 and 2
    assert counts["standard"]["device_copies"] == 4
    # coherent: layer 0 out to 1, and device 0's part follows to the new home 1; layer 1 to 0; layer 2 to 1
    assert counts["coherent"]["device_copies"] == 4
    assert counts["coherent"]["hops_kept"] == counts["standard"]["hops_kept"] == 0
    assert counts["coherent"]["hops"] == 2


def test_top_1_coherent_moves_a_token_once_a_layer_and_standard_twice(make_trace: Any) -> None:
    trace = make_trace(samples=8, tokens=20, top_k=1)
    placement = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)
    coherent, *_ = both(trace, placement, Cluster.parse("1x2"), "coherent", fraction=1.0)
    sums = dict(zip(COUNTS, coherent.counts.sum(axis=0).tolist(), strict=True))
    first_hop = (trace_ids(trace)[:, 0, 0] // 4 != np.repeat(np.arange(8) % 2, 20)).sum()
    assert sums["device_copies"] == sums["hops"] - sums["hops_kept"] + first_hop


def test_relabelling_the_devices_of_a_node_keeps_hops_and_swaps_loads(make_trace: Any) -> None:
    trace = make_trace(samples=20)
    cluster = Cluster.parse("1x2")
    ours = Placement.from_sets([[[0, 2, 4, 6], [1, 3, 5, 7]]] * 3, 8)
    swapped = Placement.from_sets([[[1, 3, 5, 7], [0, 2, 4, 6]]] * 3, 8)
    one, *_ = both(trace, ours, cluster, "coherent")
    other, *_ = both(trace, swapped, cluster, "coherent")
    np.testing.assert_array_equal(one.counts[:, 1:4], other.counts[:, 1:4])
    np.testing.assert_array_equal(one.loads, other.loads[:, :, ::-1])


def test_an_incomplete_last_step_is_left_out_of_loads_and_counted(make_trace: Any) -> None:
    trace = make_trace(samples=11, tokens=5)
    placement = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3, 8)
    tally, _, cohort = both(trace, placement, Cluster.parse("1x2"), "standard", fraction=1.0)
    assert (cohort.num_steps, cohort.dropped) == (2, 3)
    assert tally.loads.sum() == 8 * 5 * 3 * 2
    assert cohort.tokens_per_step == 20


@pytest.mark.parametrize("ranks", [2, 3])
def test_recorded_source_ranks_are_homes_only_where_the_recording_had_as_many_ranks(
    make_trace: Any, ranks: int
) -> None:
    trace = make_trace(samples=6, columns=("sample", "source_rank"), ranks=ranks)
    part = survey(trace).cohort(np.ones(6, dtype=bool), num_devices=2, samples_per_step=8)
    assert (part.home is None) == (ranks == 2)


class WithIds:
    """A trace whose ids are replaced."""

    def __init__(self, trace: Any, ids: Any) -> None:
        self.trace, self.ids = trace, ids

    def batches(self, layers: Any = None, *, phases: Any = None) -> Iterator[Any]:
        for batch in self.trace.batches(layers, phases=phases):
            yield dataclasses.replace(batch, ids=self.ids) if layers is None else batch


def trace_ids(trace: Any) -> Any:
    return np.concatenate([batch.ids for batch in trace.batches()])


def test_a_cohort_has_only_the_recorded_steps_of_its_own_units(make_trace: Any) -> None:
    found = survey(make_trace(samples=12, tokens=5, columns=("step",)))
    assert found.unit_ids.tolist() == [0, 1, 2, 3]  # three samples of five tokens a step
    cohort = found.cohort(np.array([True, False, True, False]), num_devices=2, samples_per_step=8)
    assert (cohort.num_steps, cohort.num_tokens, cohort.tokens_per_step) == (2, 30, 15)


def test_copies_to_another_node_count_once_a_device_and_once_a_node(make_trace: Any) -> None:
    """A token at device 0 of 2x2 picks experts on devices 2 and 3: two far copies each way, one remote node."""
    trace = WithIds(make_trace(samples=1, tokens=1), np.array([[[4, 6], [0, 1], [0, 2]]], dtype=np.uint16))
    placement = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8)
    tally, *_ = both(trace, placement, Cluster.parse("2x2"), "standard", fraction=1.0)
    counts = dict(zip(COUNTS, tally.counts[0].tolist(), strict=True))
    assert (counts["device_copies"], counts["far_copies"], counts["node_copies"]) == (6, 4, 2)


def test_a_device_without_slots_does_not_count_as_idle(make_trace: Any) -> None:
    trace = make_trace(samples=8)
    placement = Placement.from_sets([[[0, 1, 2, 3], [4, 5, 6, 7], []]] * 3, 8)
    tally, *_ = both(trace, placement, Cluster.parse("1x3"), "standard", fraction=1.0)
    assert (tally.slots > 0).tolist() == [True, True, False]


def test_ports_are_those_of_tokens_walked_one_by_one(make_trace: Any) -> None:
    """Experts 2d and 2d+1 on device d of 2x2; every token walked in Python."""
    trace, where = make_trace(samples=9, tokens=7, unrouted=0.2, seed=3), Cluster.parse("2x2")
    placement = Placement.from_sets([[[0, 1], [2, 3], [4, 5], [6, 7]]] * 3, 8)
    for dispatch in ("standard", "coherent"):
        tally, _, cohort = both(trace, placement, where, dispatch, fraction=1.0, samples_per_step=4)
        out, back = np.zeros((2, 2, 3, 2, 2, 4), int)
        tokens, contexts = np.zeros((2, 2, 3, 4), int)
        for row, ids in enumerate(trace_ids(trace).tolist()):
            sample, position = divmod(row, 7)
            step, here = sample // 4, sample % 4
            if step >= cohort.num_steps:
                continue
            for layer in range(3):
                devices = [expert // 2 for expert in ids[layer] if expert != 65_535]
                after = devices[0] if devices and dispatch == "coherent" else here
                tokens[step, layer, here] += 1
                contexts[step, layer, here] += 2 * position + 1
                for device in set(devices):
                    if device != here:
                        out[step, layer, int(device // 2 != here // 2), 0, here] += 1
                        out[step, layer, int(device // 2 != here // 2), 1, device] += 1
                    if device != after:
                        back[step, layer, int(device // 2 != after // 2), 0, device] += 1
                        back[step, layer, int(device // 2 != after // 2), 1, after] += 1
                here = after
        assert tally.ports is not None
        np.testing.assert_array_equal(tally.ports.dispatch, out)
        np.testing.assert_array_equal(tally.ports.combine, back)
        np.testing.assert_array_equal(np.broadcast_to(tally.ports.tokens, tokens.shape), tokens)
        np.testing.assert_array_equal(np.broadcast_to(tally.ports.contexts, contexts.shape), contexts)


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
    trace, where = make_trace(samples=2, layers=1), Cluster.parse("2x4096")
    found = survey(trace).cohort(np.ones(2, dtype=bool), num_devices=where.num_devices, samples_per_step=1)
    huge = dataclasses.replace(found, num_steps=num_steps)
    slots = np.zeros(where.num_devices, int)
    slots[0] = 8
    placement = Placement(np.arange(8, dtype=np.int32)[None], slots, 8)
    with pytest.raises(UsageError, match=words):
        Tally.empty(Route("plan", "coherent", placement), huge, where, ports=ports)


@pytest.mark.parametrize(("timed", "num_steps"), [(False, 2**17), (True, 2**14)])
def test_a_recount_notes_moves_only_to_time_them_and_refuses_what_would_not_fit(timed: bool, num_steps: int) -> None:
    assert (Ledger.empty(2, (3, 1, 4), timed=timed).moves is not None) == timed
    with pytest.raises(UsageError, match="numbers, expected at most"):
        Ledger.empty(2, (num_steps, 1, 8192), timed=timed)
