"""moeplan's own chain on an emulated cluster: profile, solve by each strategy, replay; measured beside predicted.

The embedded model on text that it never saw. Nothing waits in the place of computation, as in the other cases: its
experts are small beside the exchanges of this network.
"""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.planner.demo.text import other_text, record_embedded, record_text
from moeplan.planner.replay.job import prepare
from moeplan.planner.replay.ranks import Work, run
from moeplan.planner.replay.result import Replayed
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cases import PLANNED
from moeplan.profilers.cluster import Cluster
from moeplan.profilers.harness import Request as Measuring
from moeplan.profilers.harness import measure_cases
from moeplan.profilers.log import Log
from moeplan.profilers.profile import save
from moeplan.profilers.world import World
from moeplan.traces.reader import Trace
from moeplan.traces.schema import PHASES
from moeplan.traces.writer import TraceWriter

from .network import WIRE, Report, run_cluster

LENGTH, SAMPLES = 64, 4  # tokens of a sample, samples of a device and step
TRAINED = {"purpose": "training"}
#: Way of solving to the settings of its request; flexmoe's trace has steps of a training run
STRATEGIES: dict[str, dict[str, Any]] = {
    "exflow": {"strategy": "exflow", "time_limit_s": 5.0},
    "exflow, standard": {"strategy": "exflow", "time_limit_s": 5.0, "dispatch_model": "standard"},
    "eplb": {"strategy": "eplb", "redundant": 4},
    "pipemoe": {"strategy": "pipemoe", **TRAINED},
    "netmoe": {"strategy": "netmoe", "method": "sum", **TRAINED},
    "flexmoe": {"strategy": "flexmoe", **TRAINED},
    "luffy": {"strategy": "luffy", **TRAINED},
    "luffy, rows": {"strategy": "luffy", "condense": 0.2, **TRAINED},
    "luffy, fp8 rows": {"strategy": "luffy", "condense": 0.2, "wire": "fp8", **TRAINED},
}


@dataclass(frozen=True, slots=True)
class Chain:
    """Replays of plans on a cluster, by the way they were solved."""

    cluster: Cluster
    replays: dict[str, Replayed]


@functools.cache
def replayed(name: str, rounds: int, say: Callable[[str], None]) -> Chain:
    """The chain on an emulated cluster, "NxG"; run once a process."""
    cluster = Cluster.parse(name)
    with tempfile.TemporaryDirectory(prefix="moeplan-") as directory:
        folder = Path(directory)
        log = Log(PLANNED, grid="quick", earlier=None, on_progress=None, on_profile=None)
        run_cluster(cluster, WIRE, _measure, on_progress=log.receive)
        profile = log.profile(complete=True)
        save(profile, folder / "profile.json")
        cluster = profile.cluster  # with its links, by which ranks decide
        text = record_text() + other_text()
        trace = record_embedded(text, folder / "trace", sample_tokens=LENGTH, weights=True, embeddings="all")
        in_steps(trace, folder / "steps", SAMPLES * cluster.num_devices)
        return Chain(cluster, {way: _replayed(folder, cluster, way, rounds, say) for way in STRATEGIES})


def in_steps(trace: Trace, folder: Path, samples: int) -> None:
    """Write a trace as that of a training run, so many samples a step."""
    with TraceWriter(folder, trace.meta) as writer:
        for batch in trace.batches():
            assert batch.sample is not None
            step_T = (batch.sample // samples).astype(np.int32)
            writer.append(replace(batch, step=step_T, phase=np.full(len(batch), PHASES.index("train"), np.int8)))


def _replayed(folder: Path, cluster: Cluster, way: str, rounds: int, say: Callable[[str], None]) -> Replayed:
    """The replay of a strategy's plan."""
    say(f"{cluster}: {way}")
    settings, plan, trace = dict(STRATEGIES[way]), folder / f"{way}.json", folder / "trace"
    if settings["strategy"] == "flexmoe":
        trace = folder / "steps"
    else:
        settings["samples_per_step"] = SAMPLES * cluster.num_devices
    make(Request.of(trace=str(trace), cluster=cluster, profile=folder / "profile.json", **settings)).save(plan)
    backward = settings.get("purpose") == "training"
    asked = prepare([plan], trace, profile=folder / "profile.json", backward=backward, rounds=rounds)
    return asked.told(run_cluster(cluster, WIRE, _run, asked.work))


def _world(cluster: Cluster, rank: int, report: Report) -> World:
    hosts = tuple(f"node {one // cluster.devices_per_node}" for one in range(cluster.num_devices))
    return World(rank, cluster.num_devices, "cpu", hosts, report)


def _measure(cluster: Cluster, rank: int, _payload: None, report: Report) -> None:
    measure_cases(_world(cluster, rank, report), Measuring(PLANNED, "quick"))


def _run(cluster: Cluster, rank: int, work: Work, report: Report) -> Any:
    return run(_world(cluster, rank, report), work)
