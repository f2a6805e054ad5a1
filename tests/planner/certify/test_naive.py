"""The naive replay and the fast one give the same tallies, on every form of trace and under every journey, and other
names for devices (nodes stay together) and for experts change neither.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.planner.certify.naive import count_samples, naive_replay
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.step_size import StepSize
from moeplan.planner.evaluate.tally import Tally
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.planner.evaluate.units import SampleIndex
from moeplan.profilers.cluster import Cluster
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.solvers.replicas import ReplayRule
from moeplan.traces.schema import PHASES
from tests.oracles.units import assert_blocks, assert_lanes, assert_part, read_parts
from tests.planner.makers import counted, rewritten, scene_of

LAYERS, EXPERTS, SEED = 3, 8, 3
FOUR = StepSize("samples", 4)
PORTS = ("dispatch", "combined", "kept", "tokens", "contexts")
COLUMNS = st.sampled_from([("sample",), ("sample", "step"), ("step",), (), ("sample", "source_rank")])
CLUSTERS = st.sampled_from(["1x2", "2x2", "3x1", "2x3"])
SEEDS = st.integers(0, 2**32 - 1)


def random_placement(rng: np.random.Generator, slots: Sequence[int], rule: ReplicaRule) -> Placement:
    """Any legal placement: slots differ by device, experts are replicated at random."""
    if sum(slots) == EXPERTS:
        ends = np.cumsum(slots)[:-1]
        once = [[one.tolist() for one in np.split(rng.permutation(EXPERTS), ends)] for _ in range(LAYERS)]
        return Placement.from_sets(once, EXPERTS, rule)
    while True:
        held = [[rng.choice(EXPERTS, size=s, replace=False).tolist() for s in slots] for _ in range(LAYERS)]
        if all(set().union(*map(set, layer)) == set(range(EXPERTS)) for layer in held):
            return Placement.from_sets(held, EXPERTS, rule)


def recounted(scene: Scene) -> Scene:
    """The scene with its samples counted naively."""
    if not isinstance(scene.index, SampleIndex):
        return scene
    source, index, cluster = scene.source, scene.index, scene.cluster
    fitted_I = np.isin(np.arange(len(index.sample)), scene.cohorts[0].unit_ids)
    return replace(scene, samples=SampleCounts(source, index, fitted_I, cluster, counter=count_samples))


def assert_alike(scene: Scene, journeys: Sequence[Journey], *, fraction: float = 0.6, size: StepSize = FOUR) -> None:
    """Both replays give the same numbers, of parts that are those of a second reading."""
    parts = read_parts(scene, seed=SEED, fraction=fraction, size=size)
    for part, cohort in zip(parts, scene.cohorts, strict=True):
        assert_part(part, cohort)
        assert_blocks(part, cohort, size)
        if cohort.lanes is not None:
            assert_lanes(scene, part, cohort, size.number)
    again = recounted(scene)
    slow = naive_replay(again, journeys, ports=True, between=True)
    fast = replay(scene, journeys, ports=True, between=True)
    for slowly, fastly in zip(slow, fast, strict=True):
        for one, other in zip(slowly, fastly, strict=True):
            assert_same(one, other)
            assert (one.blocks is None) == (other.blocks is None)
            if one.blocks is not None and other.blocks is not None:
                assert_same(one.blocks, other.blocks)
    if scene.samples is not None and again.samples is not None:
        ours, theirs = (samples.under(journeys[0].placement) for samples in (scene.samples, again.samples))
        for name in ("copies", "nodes", "pairs", "linked"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        np.testing.assert_array_equal(scene.samples.experts, again.samples.experts)


def assert_same(one: Tally, other: Tally) -> None:
    for name in ("counts", "loads", "slots", "between", "moved"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=name)
    assert (one.ports is None) == (other.ports is None)
    for kind in PORTS if one.ports else ():
        np.testing.assert_array_equal(getattr(one.ports, kind), getattr(other.ports, kind), err_msg=kind)


@settings(max_examples=40)
@given(seed=SEEDS, rule=st.sampled_from(ReplicaRule), cluster=CLUSTERS, columns=COLUMNS, top_k=st.integers(1, 3))
def test_tokens_at_home_and_on_the_move(
    make_trace: Any, seed: int, rule: ReplicaRule, cluster: str, columns: Any, top_k: int
) -> None:
    size = Cluster.parse(cluster).num_devices
    trace = make_trace(samples=30, tokens=9, top_k=top_k, seed=seed % 97, unrouted=0.1, columns=columns, ranks=size)
    rng = np.random.default_rng(seed)
    slots = rng.integers(3, 8, size=size)
    slots[0] = 8
    placement = random_placement(rng, slots.tolist(), rule)
    fraction = 1.0 if not columns else 0.6
    scene = scene_of(trace, cluster, fraction=fraction)
    by_step = rule in (ReplicaRule.QUOTA, ReplicaRule.LP)
    of_engines: list[ReplayRule] = ["static", "round_robin"]
    journeys = [Journey("standard", placement)]
    if not by_step:
        journeys += [Journey("coherent", placement), *(replace(journeys[0], replica_rule=one) for one in of_engines)]
    assert_alike(scene, journeys, fraction=fraction)


@settings(max_examples=40)
@given(
    seed=SEEDS,
    cluster=st.sampled_from(["1x2", "2x2", "2x3"]),
    columns=st.sampled_from([("sample",), ("sample", "source_rank")]),
    unit=st.sampled_from(["samples", "tokens", "sequences"]),
    number=st.integers(1, 700),
    first=st.integers(0, 5),
    gaps=st.booleans(),
)
def test_steps_of_every_size(
    make_trace: Any,
    tmp_path_factory: Any,
    seed: int,
    cluster: str,
    columns: Any,
    unit: Any,
    number: int,
    first: int,
    gaps: bool,
) -> None:
    """More tokens than there are and fewer, of a phase that begins within samples, with tokens missing between."""
    size, rng = Cluster.parse(cluster).num_devices, np.random.default_rng(seed)
    whole = make_trace(samples=30, tokens=9, seed=seed % 97, unrouted=0.1, columns=columns, ranks=size)
    trace = decoding(whole, tmp_path_factory.mktemp("decoding") / "trace", first, gaps=gaps)
    asked, placement = StepSize(unit, number), random_placement(rng, [EXPERTS] * size, ReplicaRule.EVEN)
    scene = scene_of(trace, cluster, fraction=0.6, each=asked, phases=("decode",))
    standard, coherent = (Journey(model, placement) for model in ("standard", "coherent"))
    split = [replace(standard, replica_rule=rule) for rule in ("quota", "lp")]
    assert_alike(scene, [standard, coherent, *split], size=asked)


def decoding(trace: Any, folder: Path, first: int, *, gaps: bool) -> Any:
    """The trace with samples of different lengths, in decode from a position on, every fourth token away."""

    def change(batch: Any) -> Any:
        kept = (batch.position <= 5 + batch.sample % 4) & ~(gaps & (batch.position % 4 == 2))
        columns = {name: getattr(batch, name) for name in ("sample", "position", "source_rank", "ids")}
        phase = np.where(batch.position >= first, PHASES.index("decode"), PHASES.index("prefill")).astype(np.int8)
        return {name: None if one is None else one[kept] for name, one in (columns | {"phase": phase}).items()}

    return rewritten(trace, folder, change)


@settings(max_examples=40)
@given(seed=SEEDS, cluster=CLUSTERS, columns=COLUMNS.filter(lambda one: "sample" in one), replicas=st.booleans())
def test_samples_that_move(make_trace: Any, seed: int, cluster: str, columns: Any, replicas: bool) -> None:
    size = Cluster.parse(cluster).num_devices
    trace = make_trace(samples=30, tokens=9, seed=seed % 97, unrouted=0.1, columns=columns, ranks=size)
    rng, scene = np.random.default_rng(seed), scene_of(trace, cluster, moving=True, fraction=0.6)
    slots = [EXPERTS if replicas and d == 0 else EXPERTS // size + (d < EXPERTS % size) for d in range(size)]
    placement = random_placement(rng, slots, ReplicaRule.EVEN)
    moves = rng.integers(size, size=(LAYERS + 1, len(scene.index.unit_tokens)))
    stays = Journey("standard", placement, moves=np.tile(moves[0], (LAYERS + 1, 1)))
    walked = [Journey(model, placement) for model in ("standard", "coherent")]
    assert_alike(scene, [Journey("migrating", placement, moves=moves), stays, *walked])


@settings(max_examples=20)
@given(seed=SEEDS, cluster=st.sampled_from(["1x2", "2x2", "4x1"]), columns=COLUMNS)
def test_counts(make_trace: Any, tmp_path_factory: Any, seed: int, cluster: str, columns: Any) -> None:
    size, rng = Cluster.parse(cluster).num_devices, np.random.default_rng(seed)
    tokens = make_trace(samples=30, tokens=9, seed=seed % 97, unrouted=0.1, columns=columns, ranks=size)
    trace = counted(tokens, tmp_path_factory.mktemp("counts") / "trace")
    fraction = 1.0 if not columns else 0.6
    replicated = Journey("standard", random_placement(rng, [EXPERTS] + [3] * (size - 1), ReplicaRule.EVEN))
    journeys = [replicated, *(replace(replicated, replica_rule=rule) for rule in ("quota", "lp"))]
    assert_alike(scene_of(trace, cluster, fraction=fraction), journeys, fraction=fraction)
    if "sample" in columns:
        scene = scene_of(trace, cluster, moving=True, fraction=0.6)
        moves = rng.integers(size, size=(LAYERS + 1, len(scene.index.unit_tokens)))
        once = random_placement(rng, [EXPERTS // size] * size, ReplicaRule.EVEN)
        assert_alike(scene, [Journey("migrating", once, moves=moves)])


@settings(max_examples=40)
@given(
    seed=SEEDS,
    cluster=st.sampled_from(["1x2", "2x2", "4x1", "2x4"]),
    dispatch=st.sampled_from(["standard", "coherent", "migrating"]),
)
def test_names_change_no_figure(make_trace: Any, tmp_path_factory: Any, seed: int, cluster: str, dispatch: Any) -> None:
    """Every device's loads and ports go with its name, and moving samples with those of their homes."""
    where, rng, moving = Cluster.parse(cluster), np.random.default_rng(seed), dispatch == "migrating"
    trace = make_trace(samples=16, tokens=6, seed=seed % 7, unrouted=0.1)
    held_LDE = np.array([rng.permutation(EXPERTS).reshape(where.num_devices, -1) for _ in range(LAYERS)])
    homes = rng.integers(0, where.num_devices, (LAYERS + 1, 16))
    nodes, group = rng.permutation(where.num_nodes), where.devices_per_node
    device = np.concatenate([node * group + rng.permutation(group) for node in nodes])
    expert = [rng.permutation(EXPERTS) for _ in range(LAYERS)]

    def replayed(trace: Any, held_LDE: Any, to_device: Any) -> Tally:
        scene = scene_of(trace, where, moving=moving, each=8)
        (cohort,) = scene.cohorts
        if cohort.home is not None and not moving:
            scene = replace(scene, cohorts=[replace(cohort, home=to_device[cohort.home])])
        placement = Placement.from_sets(held_LDE.tolist(), EXPERTS)
        journey = Journey(dispatch, placement, moves=to_device[homes] if moving else None)
        return replay(scene, [journey], ports=True)[0][0]

    def renamed(batch: Any) -> Any:
        ids = batch.ids.copy()
        for layer, names in enumerate(expert):
            routed = ids[:, layer] < EXPERTS
            ids[:, layer][routed] = names[ids[:, layer][routed]]
        return {"ids": ids}

    same = np.arange(where.num_devices)
    plain = replayed(trace, held_LDE, same)
    called = np.stack([names[held_DE] for names, held_DE in zip(expert, held_LDE, strict=True)])
    other_trace = rewritten(trace, tmp_path_factory.mktemp("renamed"), renamed)
    for names, other in (
        (device, replayed(trace, held_LDE[:, np.argsort(device)], device)),
        (same, replayed(other_trace, called, same)),
    ):
        np.testing.assert_array_equal(plain.counts, other.counts)
        np.testing.assert_array_equal(plain.loads, other.loads[:, :, names])
        for kind in PORTS:
            theirs = getattr(other.ports, kind)
            np.testing.assert_array_equal(getattr(plain.ports, kind), theirs[..., names], err_msg=kind)
