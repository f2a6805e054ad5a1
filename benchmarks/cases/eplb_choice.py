"""The default of eplb beside published EPLB, on units held out: real counts, and counts like those of decoding.

A plan is solved as `moeplan solve` does it, and holds both figures. The data or its seed is another one in every run.

Legend: U units; L MoE layers; E experts.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np

from moeplan.planner.evaluate.metrics import BALANCE
from moeplan.planner.figures import find, value
from moeplan.planner.options import PlacementOptions
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.profilers.cluster import Cluster
from moeplan.traces.count_form import CountTable, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import Key, TraceMeta

from ..routing import GPT_OSS, OLMOE, SMARTMOE, Array, decode_counts
from ..study import Row, Settings, Study

SEEDS, SPLITS = 20, 5
LAYERS, QUICK_LAYERS = 58, 6
PAIRS_A_STEP = {"small": 2**14, "large": 2**18}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Counts `[U, L, E]` by seed, what a unit is, and where experts are to go."""

    name: str
    counts: Callable[[int], Array]
    unit: Key = "step"
    cluster: Cluster
    redundant: int
    seeds: int = SEEDS
    known: dict[str, int] = field(default_factory=dict)  #: Of the request


def outcome(scenario: Scenario, seed: int) -> tuple[float, float, str]:
    """Held-out balance of the default and of published EPLB, and what was chosen."""
    with tempfile.TemporaryDirectory() as folder:
        _store(Path(folder), scenario.counts(seed), scenario.unit)
        asked = {"trace": folder, "cluster": scenario.cluster, "redundant": scenario.redundant, **scenario.known}
        plan = make(Request.of(strategy="eplb", seed=seed, **asked)).plan
    choice = PlacementOptions.of(plan).choice
    assert plan.evaluation is not None
    assert plan.evaluation.held_out is not None
    assert choice is not None
    ours, published = (value(find(plan.evaluation.held_out, f"{name}/standard"), BALANCE) for name in ("plan", "eplb"))
    return ours, published, choice.chosen


def decoding(
    *,
    spread: float,
    kind: str,
    drift: float,
    pairs: str,
    steps: int,
    devices: int,
    layers: int = LAYERS,
    seeds: int = SEEDS,
) -> Scenario:
    """Decode steps of 256 experts in 288 slots, half of which are fitted."""
    counts = partial(
        decode_counts,
        num_steps=steps,
        num_layers=layers,
        kind=kind,
        spread=spread,
        drift=drift,
        pairs=PAIRS_A_STEP[pairs],
    )
    return Scenario(
        name=f"{kind} {spread:g}, drift {drift:g}, {pairs} steps, {steps} in all, {devices} devices",
        counts=lambda seed: counts(np.random.default_rng(seed)),
        cluster=Cluster(1, devices),
        redundant=32,
        seeds=seeds,
    )


def _decoding(settings: Settings) -> Iterator[Scenario]:
    layers, seeds = (QUICK_LAYERS, 3) if settings.quick else (LAYERS, SEEDS)
    for devices in (32,) if settings.quick else (32, 144):
        for kind, spread in (("log-normal", 1.0), ("Zipf", 0.8)):
            for drift in (0.0, 0.3):
                for pairs in PAIRS_A_STEP:
                    for steps in (8,) if settings.quick else (8, 16, 64):
                        yield decoding(
                            spread=spread,
                            kind=kind,
                            drift=drift,
                            pairs=pairs,
                            steps=steps,
                            devices=devices,
                            layers=layers,
                            seeds=seeds,
                        )


def recorded(data: Path, *, seeds: int = SPLITS) -> Iterator[Scenario]:
    """The real counts that are there, with several clusters and numbers of replicas."""
    real: tuple[tuple[str, Key, str, Callable[[Path], Array], tuple[tuple[str, int], ...]], ...] = (
        ("SmartMoE, training", "step", SMARTMOE, _smartmoe, (("2x8", 16), ("1x8", 8), ("4x8", 32))),
        ("OLMoE", "sample", OLMOE, _olmoe, (("1x8", 8), ("2x8", 16), ("4x8", 32))),
        ("gpt-oss-20b", "sample", GPT_OSS, _gpt_oss, (("1x8", 8), ("2x8", 16), ("1x4", 0))),
    )
    for name, unit, path, read, sizes in real:
        if not (data / path).is_file():
            continue
        counts = read(data / path)
        for cluster, redundant in sizes:
            yield Scenario(
                name=f"{name}, {cluster}, {redundant} replicas",
                counts=lambda _, counts=counts: counts,  # type: ignore[misc]
                unit=unit,
                cluster=Cluster.parse(cluster),
                redundant=redundant,
                seeds=seeds,
            )


def _rows(scenario: Scenario) -> Iterator[Row]:
    runs = [outcome(scenario, seed) for seed in range(scenario.seeds)]
    chosen = Counter(choice for _, _, choice in runs)
    worst = max(ours - published for ours, published, _ in runs)
    more = {"worst seed over published": worst, **{f"{by} chosen": float(n) for by, n in sorted(chosen.items())}}
    yield Row(scenario.name, "published", quality=fmean(published for _, published, _ in runs), bound=1.0)
    yield Row(scenario.name, "default", quality=fmean(ours for ours, _, _ in runs), bound=1.0, more=more)


def _store(folder: Path, counts: Array, unit: Key) -> None:
    num_units, num_layers, num_experts = counts.shape
    unit_R = np.repeat(np.arange(num_units), num_layers)
    table = CountTable(
        step=unit_R.astype(np.int32) if unit == "step" else None,
        sample=unit_R if unit == "sample" else None,
        layer=np.tile(np.arange(num_layers, dtype=np.int32), num_units),
        counts=counts.reshape(-1, num_experts),
    )
    model = ModelSpec(name="counts", layer_ids=tuple(range(num_layers)), num_experts=num_experts, top_k=1)
    write_counts(folder, TraceMeta(form="counts", model=model, recorder="benchmark"), [table])


def _smartmoe(path: Path) -> Array:
    with np.load(path) as arrays:
        return np.asarray(arrays["counts"].astype(np.int64).sum(axis=(1, 3)))  # of ranks and micro-batches


def _olmoe(path: Path) -> Array:
    with np.load(path) as arrays:
        return np.asarray(arrays["counts"].astype(np.int64))


def _gpt_oss(path: Path) -> Array:
    with np.load(path) as arrays:
        ids_TLK, seq_T, num_experts = arrays["expert_ids"], arrays["seq_id"], int(arrays["num_experts"])
    _, sample_T = np.unique(seq_T, return_inverse=True)
    counts = np.zeros((sample_T.max() + 1, ids_TLK.shape[1], num_experts), np.int64)
    for layer in range(ids_TLK.shape[1]):
        np.add.at(counts[:, layer], (sample_T[:, None], ids_TLK[:, layer]), 1)
    return counts


STUDIES = (
    Study(
        title="Counts like those of decoding, 58 x 256 experts in 288 slots",
        quality="held-out max/mean",
        note="Synthetic: a step's counts are multinomial in shares that drift from step to step (a first-order"
        " autoregression of their logarithms, of this deviation); small steps hold 16,384 pairs of a layer, large ones"
        " 262,144. Half of the steps are fitted. Mean over 20 seeds.",
        instances=_decoding,
        rows=_rows,
    ),
    Study(
        title="Recorded counts",
        quality="held-out max/mean",
        note="Mean over five splits.",
        instances=lambda settings: recorded(settings.data, seeds=2 if settings.quick else SPLITS),
        rows=_rows,
        needs=SMARTMOE,
    ),
)
