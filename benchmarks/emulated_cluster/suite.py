"""The suite: all cases on one emulated cluster, one start of its ranks for all, the profile first."""

import functools
import sys
from dataclasses import dataclass

from moeplan.profilers.cluster import Cluster

from .calibration import Profile, calibrate
from .case import Case, Figure, Measured
from .condensing import CONDENSING
from .inference import INFERENCE
from .network import WIRE, Report, run_cluster
from .overhead import OVERHEAD
from .pipelining import PIPELINING
from .rehoming import REHOMING

CASES: dict[str, Case] = {
    "inference": INFERENCE,
    "rehoming": REHOMING,
    "condensing": CONDENSING,
    "pipelining": PIPELINING,
    "overhead": OVERHEAD,
}
CLUSTERS = ("2x2", "4x2")
ROUNDS, MANY_ROUNDS = 6, 25  # as few as tell a 95 % interval: steps repeat within some percent


@dataclass(frozen=True, slots=True)
class Found:
    """The profile of a cluster, and the figures of every case."""

    profile: Profile
    figures: dict[str, list[Figure]]


@functools.cache
def found(name: str, rounds: int) -> Found:
    """What all cases come to on an emulated cluster of N nodes of G ranks, "NxG"; measured once a process.

    Raises
    ------
    UsageError
        Namespaces cannot be made here (`network`).
    """
    cluster = Cluster.parse(name)
    prepared = {name: case.prepare(cluster) for name, case in CASES.items()}
    results = run_cluster(cluster, WIRE, _on_rank, (prepared, rounds), on_progress=say)
    profile, measured = results[0]
    told = {name: case.told(cluster, profile, prepared[name], measured[name]) for name, case in CASES.items()}
    return Found(profile, told)


def _on_rank(
    cluster: Cluster, rank: int, given: tuple[dict[str, object], int], report: Report
) -> tuple[Profile, dict[str, Measured]]:
    prepared, rounds = given
    report(f"{cluster}: profile")
    profile, measured = calibrate(cluster, rank), {}
    for name, one in prepared.items():
        report(f"{cluster}: {name}")
        measured[name] = CASES[name].run(cluster, rank, profile, one, rounds)
    return profile, measured


def say(text: str) -> None:
    """Tell on stderr what is measured."""
    print(f"          {text}", file=sys.stderr, flush=True)
