"""Other names for devices (nodes stay together) and for experts change no figure, of tokens at home or on the move."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.planner.evaluate.journey import Journey
from moeplan.planner.evaluate.replay import replay
from moeplan.planner.evaluate.scene import Scene
from moeplan.planner.evaluate.splits import Cohort, index_samples, index_units
from moeplan.planner.evaluate.tally import Tally
from moeplan.planner.evaluate.traffic import SampleCounts
from moeplan.profilers.cluster import Cluster
from moeplan.solvers.placement import Placement
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.writer import TraceWriter

Names = np.ndarray
CLUSTERS = st.sampled_from(["1x2", "2x2", "4x1", "2x4"])


def renamed(trace: Trace, names: list[Names], folder: Path) -> Trace:
    """The trace with other names for its experts, layer by layer."""
    with TraceWriter(folder, trace.meta) as writer:
        for batch in trace.batches():
            ids = batch.ids.copy()
            for layer, name in enumerate(names):
                routed = ids[:, layer] < len(name)
                ids[:, layer][routed] = name[ids[:, layer][routed]]
            writer.append(dataclasses.replace(batch, ids=ids))
    return open_trace(folder)


def device_names(rng: np.random.Generator, cluster: Cluster) -> Names:
    """A name for every device; those of a node keep a node in common."""
    nodes = rng.permutation(cluster.num_nodes)
    group = cluster.devices_per_node
    return np.concatenate([nodes[n] * group + rng.permutation(group) for n in range(cluster.num_nodes)])


def placed(rng: np.random.Generator, cluster: Cluster) -> list[list[list[int]]]:
    """Eight experts, equally many on every device, in each of three layers."""
    return [rng.permutation(8).reshape(cluster.num_devices, -1).tolist() for _ in range(3)]


def replayed(trace: Any, held: Any, dispatch: Any, cohort: Cohort, cluster: Cluster) -> Tally:
    scene = Scene(trace, index_units(trace), [cohort], cluster, trace.meta.model, None, 0)
    return replay(scene, [Journey(dispatch, Placement.from_sets(held, 8))], ports=True)[0][0]


def moved(trace: Any, held: Any, homes: Names, cohort: Cohort, cluster: Cluster) -> Tally:
    index, placement = index_samples(trace), Placement.from_sets(held, 8)
    counts = SampleCounts(trace, index, np.ones(len(index.sample), bool), cluster)
    scene = Scene(trace, index, [cohort], cluster, trace.meta.model, None, 0, samples=counts)
    return replay(scene, [Journey("migrating", placement, moves=homes)], ports=True)[0][0]


def assert_alike(one: Tally, other: Tally, names: Names) -> None:
    """The same counts, and every device's loads and ports under its new name."""
    np.testing.assert_array_equal(one.counts, other.counts)
    np.testing.assert_array_equal(one.loads, other.loads[:, :, names])
    assert one.ports is not None
    assert other.ports is not None
    for kind in ("dispatch", "combine", "tokens", "contexts"):
        theirs = getattr(other.ports, kind)
        np.testing.assert_array_equal(getattr(one.ports, kind), theirs[..., names], err_msg=kind)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), cluster=CLUSTERS, dispatch=st.sampled_from(["standard", "coherent"]))
def test_other_names_change_no_figure_of_a_placement(
    make_trace: Any, tmp_path_factory: pytest.TempPathFactory, seed: int, cluster: str, dispatch: str
) -> None:
    where, rng = Cluster.parse(cluster), np.random.default_rng(seed)
    trace, held = make_trace(samples=16, tokens=6, seed=seed % 7, unrouted=0.1), placed(rng, where)
    cohort = index_units(trace).cohort(np.ones(16, bool), num_devices=where.num_devices, samples_per_step=8)
    plain = replayed(trace, held, dispatch, cohort, where)

    names = device_names(rng, where)
    there = [[layer[device] for device in np.argsort(names)] for layer in held]
    assert cohort.home is not None
    at = dataclasses.replace(cohort, home=names[cohort.home])
    assert_alike(plain, replayed(trace, there, dispatch, at, where), names)

    experts = [rng.permutation(8) for _ in range(3)]
    called = [[experts[layer][device].tolist() for device in row] for layer, row in enumerate(held)]
    same = replayed(renamed(trace, experts, tmp_path_factory.mktemp("renamed")), called, dispatch, cohort, where)
    assert_alike(plain, same, np.arange(where.num_devices))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), cluster=CLUSTERS)
def test_other_names_change_no_figure_of_samples_that_move(
    make_trace: Any, tmp_path_factory: pytest.TempPathFactory, seed: int, cluster: str
) -> None:
    where, rng = Cluster.parse(cluster), np.random.default_rng(seed)
    trace, held = make_trace(samples=16, tokens=6, seed=seed % 7, unrouted=0.1), placed(rng, where)
    homes = rng.integers(0, where.num_devices, (4, 16))
    cohort = index_samples(trace).cohort(np.ones(16, bool), num_devices=where.num_devices, samples_per_step=8)
    plain = moved(trace, held, homes, cohort, where)

    names = device_names(rng, where)
    there = [[layer[device] for device in np.argsort(names)] for layer in held]
    assert_alike(plain, moved(trace, there, names[homes], cohort, where), names)

    experts = [rng.permutation(8) for _ in range(3)]
    called = [[experts[layer][device].tolist() for device in row] for layer, row in enumerate(held)]
    same = moved(renamed(trace, experts, tmp_path_factory.mktemp("renamed")), called, homes, cohort, where)
    assert_alike(plain, same, np.arange(where.num_devices))
