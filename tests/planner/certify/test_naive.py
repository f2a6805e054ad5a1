"""The naive replay and the fast one give the same tallies, on every form of trace and under every journey."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.planner.certify.census import Source
from moeplan.planner.certify.naive import NaiveReplay
from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.splits import index_samples, index_units
from moeplan.planner.evaluate.tally import Tally
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.profilers.cluster import Cluster
from moeplan.solvers.placement import Placement, ReplicaRule
from moeplan.traces.count_form import CountTrace, read_counts, tabulate, write_counts
from moeplan.traces.reader import Trace

LAYERS, EXPERTS, SEED, EACH = 3, 8, 3, 4


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


def scene_of(trace: Trace | CountTrace, cluster: str, *, moving: bool = False, fraction: float = 0.6) -> Scene:
    """Both parts of a trace, samples counted one by one where they are to move."""
    where = Cluster.parse(cluster)
    index: Any = index_samples(trace) if moving else index_units(trace)
    fitted_U = index.fitted(seed=SEED, fraction=fraction)
    masks = [fitted_U] if fitted_U.all() else [fitted_U, ~fitted_U]
    cohorts = [index.cohort(mask, num_devices=where.num_devices, samples_per_step=EACH) for mask in masks if mask.any()]
    counts = SampleCounts(trace, index, fitted_U, where) if moving else None
    return Scene(trace, index, cohorts, where, trace.meta.model, None, SEED, samples=counts)


def recounted(scene: Scene, naive: NaiveReplay) -> Scene:
    """The scene with its samples counted naively."""
    if scene.samples is None:
        return scene
    counts = SampleCounts(
        scene.source,
        scene.samples.index,
        np.zeros(0, bool),
        scene.cluster,
        counter=partial(naive.count_samples, Source.of(scene)),
    )
    return dataclasses.replace(scene, samples=counts)


def counted(trace: Trace, folder: Path) -> CountTrace:
    """The counts of a trace."""
    write_counts(folder, trace.meta.model_copy(update={"form": "counts"}), tabulate(trace))
    return read_counts(folder)


def assert_alike(scene: Scene, journeys: Sequence[Journey], *, fraction: float = 0.6) -> None:
    """Both replays give the same numbers."""
    naive = NaiveReplay(scene.cluster, SEED, fraction, EACH)
    again = recounted(scene, naive)
    slow, fast = naive(again, journeys, ports=True, between=True), replay(scene, journeys, ports=True, between=True)
    for ours, theirs in zip(slow, fast, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    if scene.samples is not None and again.samples is not None:
        assert_counted_alike(scene.samples, again.samples, journeys[0].placement)


def assert_counted_alike(one: SampleCounts, other: SampleCounts, placement: Placement) -> None:
    """Samples have the same pairs, copies and links."""
    ours, theirs = one.under(placement), other.under(placement)
    for name in ("copies", "nodes", "pairs", "linked"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_array_equal(one.experts, other.experts)


def assert_same(one: Tally, other: Tally) -> None:
    np.testing.assert_array_equal(one.counts, other.counts)
    np.testing.assert_allclose(one.loads, other.loads, rtol=1e-12)
    np.testing.assert_array_equal(one.slots, other.slots)
    assert (one.ports is None, one.between is None) == (other.ports is None, other.between is None)
    for kind in ("dispatch", "combine", "tokens", "contexts") if one.ports else ():
        np.testing.assert_array_equal(getattr(one.ports, kind), getattr(other.ports, kind), err_msg=kind)
    if one.between is not None and other.between is not None:
        np.testing.assert_array_equal(one.between, other.between)
    if one.moved is not None or other.moved is not None:
        np.testing.assert_allclose(one.moved, other.moved)  # type: ignore[arg-type]


COLUMNS = st.sampled_from([("sample",), ("sample", "step"), ("step",), (), ("sample", "source_rank")])
CLUSTERS = st.sampled_from(["1x2", "2x2", "3x1", "2x3"])
SEEDS = st.integers(0, 2**32 - 1)


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
    assert_alike(scene, [Journey(model, placement) for model in ("standard", "coherent")], fraction=fraction)


@settings(max_examples=40)
@given(seed=SEEDS, cluster=CLUSTERS, columns=COLUMNS.filter(lambda one: "sample" in one), replicas=st.booleans())
def test_samples_that_move(make_trace: Any, seed: int, cluster: str, columns: Any, replicas: bool) -> None:
    size = Cluster.parse(cluster).num_devices
    trace = make_trace(samples=30, tokens=9, seed=seed % 97, unrouted=0.1, columns=columns, ranks=size)
    rng, scene = np.random.default_rng(seed), scene_of(trace, cluster, moving=True)
    slots = [EXPERTS if replicas and d == 0 else EXPERTS // size + (d < EXPERTS % size) for d in range(size)]
    placement = random_placement(rng, slots, ReplicaRule.EVEN)
    moves = rng.integers(size, size=(LAYERS + 1, len(scene.index.unit_tokens)))
    stays = Journey("standard", placement, moves=np.tile(moves[0], (LAYERS + 1, 1)))
    walked = [Journey(model, placement) for model in ("standard", "coherent")]
    assert_alike(scene, [Journey("migrating", placement, moves=moves), stays, *walked])


@settings(max_examples=20)
@given(seed=SEEDS, cluster=st.sampled_from(["1x2", "2x2", "4x1"]), columns=COLUMNS)
def test_counts(
    make_trace: Any, tmp_path_factory: pytest.TempPathFactory, seed: int, cluster: str, columns: Any
) -> None:
    size, rng = Cluster.parse(cluster).num_devices, np.random.default_rng(seed)
    tokens = make_trace(samples=30, tokens=9, seed=seed % 97, unrouted=0.1, columns=columns, ranks=size)
    trace = counted(tokens, tmp_path_factory.mktemp("counts") / "trace")
    fraction = 1.0 if not columns else 0.6
    scene = scene_of(trace, cluster, fraction=fraction)
    slots = [EXPERTS, *(3 for _ in range(size - 1))]
    assert_alike(scene, [Journey("standard", random_placement(rng, slots, ReplicaRule.EVEN))], fraction=fraction)
    if "sample" in columns:
        scene = scene_of(trace, cluster, moving=True)
        moves = rng.integers(size, size=(LAYERS + 1, len(scene.index.unit_tokens)))
        once = random_placement(rng, [EXPERTS // size] * size, ReplicaRule.EVEN)
        assert_alike(scene, [Journey("migrating", once, moves=moves)])
