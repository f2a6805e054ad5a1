"""Replicas that follow the load, trained on an emulated cluster: seconds of a step beside what was predicted."""

import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeplan.profilers.cluster import Cluster

from ..emulated_cluster.calibration import Profile, calibrate
from ..emulated_cluster.network import WIRE, Report, run_cluster
from ..emulated_cluster.prediction import training_seconds
from ..emulated_cluster.suite import CLUSTERS
from ..emulated_cluster.timing import ratio
from ..emulated_cluster.training import (
    EXPERT,
    FITTED,
    HIDDEN,
    IDEAL,
    LAYERS,
    NEVER,
    PAIR_S,
    START,
    STATIC,
    TODAY,
    TOKENS,
    WARM,
    Drift,
    Trained,
    drift_of,
    run,
)
from ..routing import SMARTMOE
from ..study import Row, Settings, Study

Array = np.ndarray
Instance = tuple[str, int, Path]
STEPS, QUICK_STEPS = 56, 8
RECORDED_LAYERS, FIRST = (4, 8), 10  # of the recording
EXPERTS_A_DEVICE, ZIPF = 4, 1.26
DRIFT, KEPT = 0.078, 0.87  # shares change by 3 % from one record to the next, by 7 % in ten (total variation)
SEED = 14
PARTS = ("experts", "exchanges", "replicas", "moves", "calls")


@dataclass(frozen=True, slots=True)
class Found:
    """The profile of a cluster, and how every way trained, by drift."""

    profile: Profile
    drifts: list[Drift]
    trained: dict[str, dict[str, Trained]]


@functools.cache
def found(name: str, steps: int, data: Path) -> Found:
    """All trainings on an emulated cluster, "NxG"; measured once a process."""
    cluster = Cluster.parse(name)
    shares = {"Zipf 1.26": zipf(cluster, FITTED + steps)}
    if (data / SMARTMOE).exists():
        shares["SmartMoE"] = recorded(cluster, FITTED + steps, data)
    drifts = [drift_of(name, cluster, one, SEED) for name, one in shares.items()]
    results = run_cluster(cluster, WIRE, _on_rank, drifts, on_progress=lambda text: print(text, file=sys.stderr))
    profile, trained = results[0]
    return Found(profile, drifts, trained)


def _on_rank(
    cluster: Cluster, rank: int, drifts: list[Drift], report: Report
) -> tuple[Profile, dict[str, dict[str, Trained]]]:
    report(f"{cluster}: profile")
    return calibrate(cluster, rank), run(cluster, rank, drifts, report)


def zipf(cluster: Cluster, records: int) -> Array:
    """Zipf's shares by record, layer, rank and expert, `[R, L, D, E]`; their logarithms drift."""
    rng, num_experts = np.random.default_rng(SEED), EXPERTS_A_DEVICE * cluster.num_devices
    base = [rng.permutation(-ZIPF * np.log(np.arange(1, num_experts + 1))) for _ in range(LAYERS)]
    drift, found = np.zeros((LAYERS, num_experts)), []
    for _ in range(records):
        share = np.exp(base + drift)
        found.append(np.repeat(share[:, None] / share.sum(axis=1)[:, None, None], cluster.num_devices, axis=1))
        drift = KEPT * drift + rng.normal(0, DRIFT, drift.shape)
    return np.array(found)


def recorded(cluster: Cluster, records: int, data: Path) -> Array:
    """SmartMoE's shares by record, layer, rank and expert, `[R, L, D, E]`; its sources are spread over the ranks."""
    with np.load(data / SMARTMOE) as arrays:
        counts = arrays["counts"][FIRST : FIRST + records, :, list(RECORDED_LAYERS)].astype(np.int64)
    pairs = counts.sum(axis=3)  # over micro-batches, [R, sources, L, E]
    parts = np.stack([part.sum(axis=1) for part in np.split(pairs, cluster.num_devices, axis=1)], axis=2)
    shares: Array = parts / parts.sum(axis=3, keepdims=True)
    return shares


def _instances(settings: Settings) -> list[Instance]:
    clusters = CLUSTERS[:1] if settings.quick else CLUSTERS
    return [(cluster, QUICK_STEPS if settings.quick else STEPS, settings.data) for cluster in clusters]


def _rows(instance: Instance) -> Iterator[Row]:
    cluster, here = Cluster.parse(instance[0]), found(*instance)
    for one in here.drifts:
        ways = here.trained[one.name]
        today_s, even_s = (float(np.mean(ways[way].seconds.samples)) for way in (TODAY, IDEAL))
        for way, trained in ways.items():
            if way == NEVER:
                continue
            parts = training_seconds(here.profile, cluster, one, way, trained).mean(axis=0)
            measured_s, (low, high) = float(np.mean(trained.seconds.samples)), trained.seconds.interval
            more = {
                "median, s": trained.seconds.median,
                "from, s": low,
                "to, s": high,
                "of even loads, %": even_s / measured_s,
                "prediction over measured, %": float(parts.sum()) / measured_s - 1,
                **{f"{name}, s": float(part) for name, part in zip(PARTS, parts, strict=True)},
                "table changes": float(sum((a != b).any() for a, b in itertools.pairwise(trained.tables))),
                "owners moved": float(sum((a != b).sum() for a, b in itertools.pairwise(trained.owners))),
            }
            name, predicted_s = f"{cluster}, {one.name}", float(parts.sum())
            yield Row(name, way, quality=predicted_s, seconds=measured_s, ratio=today_s / measured_s, more=more)


def _overhead(instance: Instance) -> Iterator[Row]:
    for name, ways in found(*instance).trained.items():
        for way in (STATIC, NEVER):
            slower, low, high = ratio(ways[way].seconds, ways[STATIC].seconds)
            more = {"takes, x": slower, "x from": low, "x to": high}
            yield Row(f"{instance[0]}, {name}", way, quality=ways[way].seconds.median, more=more)


NOTE = (
    f" {LAYERS} layers; {TOKENS} tokens of {HIDDEN} float32 a rank, one expert each, whose gradient is"
    f" {EXPERT / TOKENS / HIDDEN:.2g} of a rank's tokens; a token-expert pair takes {1e3 * PAIR_S:g} ms forward, twice"
    f" that backward. Nodes are network namespaces on links of {WIRE.rate_mbps:g} Mbit/s; experts are calibrated waits;"
    f" AdamW. Placements are made for the {START} records before the first step; flexmoe's policy, or none, is the best"
    f" of those tried on {FITTED} records. Every step is the next record, 10 iterations later: loads drift ten times as"
    " fast as in the training, and what moves is paid in full. Ways run in turn, forth and back, step by step;"
    f" {WARM} steps are not timed."
)
STUDIES = (
    Study(
        title="A training step while the load drifts",
        quality="predicted, s",
        baseline=TODAY,
        instances=_instances,
        rows=_rows,
        note="Mean seconds of a step under each way, beside those that a profile taken before predicts. Even loads:"
        " every expert gets as many tokens, under today's placement; replicas may do better, as they keep tokens on"
        " their node. Parts are predicted. Median: with its 95 % interval." + NOTE,
    ),
    Study(
        title="A policy that never moves",
        quality="step, s",
        instances=_instances,
        rows=_overhead,
        note="Seconds of a step with and without a policy that counts, decides and agrees, and never moves."
        " Takes: median of the steps' ratios, with its 95 % interval." + NOTE,
    ),
)
