"""moeplan's own chain on an emulated cluster: profile, solve by each strategy, replay; measured beside predicted.

The embedded model on text that it never saw. Nothing waits in the place of computation, as in the other cases: its
experts are small beside the exchanges of this network.
"""

import copy
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.planner.demo.text import other_text, record_embedded, record_text
from moeplan.planner.replay.job import Experiment, prepare
from moeplan.planner.replay.ranks import Work, run
from moeplan.planner.replay.result import Replayed
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cases import PLANNED
from moeplan.profilers.cases.case import Alone, Case, Collective
from moeplan.profilers.cases.exchange import AllGather, AllToAll
from moeplan.profilers.cases.point_to_point import PointToPoint, pairs
from moeplan.profilers.cases.routed_exchange import RoutedExchange, ways
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.harness import Request as Measuring
from moeplan.profilers.harness import measure_cases
from moeplan.profilers.log import Log
from moeplan.profilers.measurement import Size
from moeplan.profilers.profile import Profile, save
from moeplan.profilers.world import World
from moeplan.runtime.condensed_rows import CondensedRows
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES
from moeplan.traces.writer import TraceWriter

from .network import WIRE, Report, run_cluster

LENGTH, SAMPLES = 64, 4  # tokens of a sample, samples of a device and step
#: Without the burst that may follow a pause: exchanges are profiled with pauses between them, and chunks have none
STEADY = replace(WIRE, burst_bytes=3000, frame_bytes=1500)
PAIR_BYTES = (2**10, 2**18)
BUFFER_BYTES = (2**10, 2**13, 2**16, 2**19)  # of four ranks
OCTAVES = (0, 4, 6, 7, 8, 9, 10)  # of a kilobyte that a rank handles in an exchange
RECORDED = "steps of a training run"
Settings = dict[str, Any]
#: What is run to the requests of its plans, which are replayed beside one another
RUNS: dict[str, dict[str, Settings]] = {
    "forward": {
        "exflow": {"strategy": "exflow", "time_limit_s": 5.0},
        "exflow, standard": {"strategy": "exflow", "time_limit_s": 5.0, "dispatch_model": "standard"},
        "eplb": {"strategy": "eplb", "redundant": 8},
    },
    "forward and backward": {
        "pipemoe": {"strategy": "pipemoe"},
        "netmoe": {"strategy": "netmoe", "method": "sum"},
        "luffy": {"strategy": "luffy"},
        "luffy, rows": {"strategy": "luffy", "condense": 0.2},
        "luffy, fp8 rows": {"strategy": "luffy", "condense": 0.2, "wire": "fp8"},
    },
    RECORDED: {"flexmoe": {"strategy": "flexmoe"}},
}


class _Buffers(Collective):
    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        return [{"bytes": world.size * count // 4} for count in BUFFER_BYTES]


class _AllToAll(_Buffers, AllToAll):
    pass


class _AllGather(_Buffers, AllGather):
    pass


class _RoutedExchange(RoutedExchange):
    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        return [{"bytes": 1024 << octave, **way} for octave in OCTAVES for way in ways(world.size)]


class _PointToPoint(PointToPoint):
    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        return [{"bytes": count, "first": one, "second": two} for count in PAIR_BYTES for one, two in pairs(world.size)]


#: Collectives at sizes that this wire carries in less than a second each
COLLECTIVES: dict[str, Case] = {
    case.name: case for case in (_AllToAll(), _RoutedExchange(), _AllGather(), _PointToPoint())
}


def small(case: Case) -> Case:
    """A case that planning reads, at sizes that suit this wire and small models."""
    if not isinstance(case, Alone):
        return COLLECTIVES[case.name]
    alone = copy.copy(case)
    alone.grids = replace(case.grids, cpu=case.grids.quick_cpu)
    return alone


MEASURED: tuple[Case, ...] = tuple(map(small, (*PLANNED, CondensedRows())))


@dataclass(frozen=True, slots=True)
class Chain:
    """Replays on a cluster, by what is run."""

    cluster: Cluster
    replays: dict[str, Replayed]


@functools.cache
def replayed(name: str, rounds: int, say: Callable[[str], None]) -> Chain:
    """The chain on an emulated cluster, "NxG"; run once a process."""
    cluster = Cluster.parse(name)
    with tempfile.TemporaryDirectory(prefix="moeplan-") as directory:
        folder = Path(directory)
        say(f"{cluster}: profile of the chain")
        profile = profiled(cluster)
        save(profile, folder / "profile.json")
        text = record_text() + other_text()
        trace = record_embedded(text, folder / "trace", sample_tokens=LENGTH, weights=True, embeddings="all")
        in_steps(trace, folder / "steps", SAMPLES * cluster.num_devices)
        return Chain(profile.cluster, {what: replay_of(folder, profile.cluster, what, rounds, say) for what in RUNS})


def profiled(cluster: Cluster) -> Profile:
    """What `moeplan profile` would measure there, at sizes that suit the wire."""
    log = Log(MEASURED, grid="default", earlier=None, on_progress=None, on_profile=None)
    run_cluster(cluster, STEADY, _measure, on_progress=log.receive)
    return log.profile(complete=True)


def in_steps(trace: Trace, folder: Path, samples: int) -> None:
    """Write a trace as that of a training run, so many samples a step."""
    with TraceWriter(folder, trace.meta) as writer:
        for batch in trace.batches():
            assert batch.sample is not None
            step_T = (batch.sample // samples).astype(np.int32)
            writer.append(replace(batch, step=step_T, phase=np.full(len(batch), PHASES.index("train"), np.int8)))


def replay_of(folder: Path, cluster: Cluster, what: str, rounds: int, say: Callable[[str], None]) -> Replayed:
    """The replay of plans beside one another, by what is run; profile and traces are in the folder.

    The cluster has its links, by which ranks decide.
    """
    plans, profile, trace = list[Path](), folder / "profile.json", folder / "trace"
    usual: Settings = {"samples_per_step": SAMPLES * cluster.num_devices}
    if what == RECORDED:
        trace, usual = folder / "steps", {}
    trained = what != "forward"
    if trained:
        usual["purpose"] = "training"
    for way, settings in RUNS[what].items():
        say(f"{cluster}: solving {way}")
        plans.append(folder / f"{way}.json")
        asked = Request.of(trace=str(trace), cluster=cluster, profile=profile, **usual, **settings)
        make(asked).save(plans[-1])
    say(f"{cluster}: {what}")
    prepared = prepare(Experiment(plans=plans, trace=str(trace), profile=profile, backward=trained, rounds=rounds))
    return prepared.told(run_cluster(cluster, STEADY, _run, prepared.work))


def _world(cluster: Cluster, rank: int, report: Report) -> World:
    hosts = tuple(f"node {one // cluster.devices_per_node}" for one in range(cluster.num_devices))
    return World(rank, cluster.num_devices, "cpu", hosts, report)


def _measure(cluster: Cluster, rank: int, _payload: None, report: Report) -> None:
    measure_cases(_world(cluster, rank, report), Measuring(MEASURED, "default"))


def _run(cluster: Cluster, rank: int, work: Work, report: Report) -> Any:
    return run(_world(cluster, rank, report), work)
