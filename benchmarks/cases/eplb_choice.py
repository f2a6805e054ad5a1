"""The default of eplb beside published EPLB, on units held out, over 20 seeds: recorded counts, and ones like decoding.

A plan is solved as `moeplan solve --strategy eplb` does it, and holds the figures of both. The seed draws the counts of
decoding, and which half is fitted.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from moeplan.planner.evaluate.metrics import BALANCE
from moeplan.planner.figures import contender_of, figure_of
from moeplan.planner.request import Request
from moeplan.planner.solve import make
from moeplan.planner.strategies.placement_options import PlacementOptions
from moeplan.profilers.cluster import Cluster
from moeplan.traces.importers import import_trace

from ..routing import GPT_OSS, OLMOE, SMARTMOE, decode_counts
from ..study import Row, Settings, Study

SEEDS, QUICK_SEEDS = 20, 2
RECORDED = (  # file, experts per token, and of each cluster the replicas per layer
    ("SmartMoE training", SMARTMOE, 2, (("2x8", 16),)),
    ("OLMoE", OLMOE, 8, (("2x8", 16), ("4x8", 32))),
    ("gpt-oss-20b", GPT_OSS, 4, (("1x8", 8),)),
)
SMALL, LARGE = 2**14, 2**18  # token-expert pairs of a step and layer
DECODING = (  # shares, their deviation from step to step, pairs, steps, cluster
    ("log-normal", 1.0, 0.0, SMALL, 16, "1x32"),
    ("log-normal", 1.0, 0.3, LARGE, 16, "1x32"),
    ("Zipf", 0.8, 0.3, SMALL, 8, "1x32"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A trace by folder and seed, and where its experts are to go."""

    name: str
    trace: Callable[[Path, int], Path]
    cluster: str
    redundant: int
    seeds: int = SEEDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """Held-out balance of the default and of published EPLB, and what was chosen."""

    default: float
    published: float
    chosen: str


def outcomes(scenario: Scenario) -> Iterator[Outcome]:
    """The outcome of every seed."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(scenario.seeds):
            plan = make(
                Request.of(
                    strategy="eplb",
                    trace=str(scenario.trace(Path(folder), seed)),
                    cluster=Cluster.parse(scenario.cluster),
                    redundant=scenario.redundant,
                    seed=seed,
                )
            ).plan
            choice = PlacementOptions.of(plan).choice
            assert plan.evaluation is not None
            assert plan.evaluation.held_out is not None
            assert choice is not None
            ours, published = (contender_of(plan.evaluation.held_out, f"{name}/standard") for name in ("plan", "eplb"))
            yield Outcome(figure_of(ours, BALANCE), figure_of(published, BALANCE), choice.chosen)


def recorded(data: Path, *, seeds: int = SEEDS) -> Iterator[Scenario]:
    """The recordings that are there, in several clusters."""
    for name, path, top_k, sizes in RECORDED:

        def trace(folder: Path, _: int, source: Path = data / path, top_k: int = top_k) -> Path:
            if not (folder / "trace").exists():
                import_trace(source, folder / "trace", top_k=top_k)
            return folder / "trace"

        for cluster, redundant in sizes if (data / path).is_file() else ():
            where = f"{name} on {cluster}, {redundant} replicas"
            yield Scenario(name=where, trace=trace, cluster=cluster, redundant=redundant, seeds=seeds)


def decoding(
    kind: str,
    spread: float,
    drift: float,
    pairs: int,
    steps: int,
    cluster: str,
    *,
    layers: int = 8,
    seeds: int = SEEDS,
) -> Scenario:
    """Decode steps of 256 experts in 288 slots."""

    def trace(folder: Path, seed: int) -> Path:
        rng, size = np.random.default_rng(seed), {"num_steps": steps, "num_layers": layers, "pairs": pairs}
        counts = decode_counts(rng, kind=kind, spread=spread, drift=drift, **size)
        np.savez(folder / f"{seed}.npz", counts=counts[:, None, :, None], iteration=np.arange(steps))
        import_trace(folder / f"{seed}.npz", folder / str(seed), top_k=8)
        return folder / str(seed)

    name = f"{kind} {spread:g}, drift {drift:g}, {steps} steps of {pairs:,} on {cluster}"
    return Scenario(name=name, trace=trace, cluster=cluster, redundant=32, seeds=seeds)


def _rows(scenario: Scenario) -> Iterator[Row]:
    runs = list(outcomes(scenario))
    ours, published = (np.array([getattr(run, name) for run in runs]) for name in ("default", "published"))
    less = ours - published
    half = float(student.ppf(0.975, len(runs) - 1) * less.std(ddof=1) / np.sqrt(len(runs)))
    more = {
        "default - published": float(less.mean()),
        "low": float(less.mean()) - half,
        "high": float(less.mean()) + half,
        "seeds worse": float((less > 0).sum()),
        **{f"{by} chosen": float(times) for by, times in sorted(Counter(run.chosen for run in runs).items())},
    }
    yield Row(scenario.name, "published", quality=float(published.mean()), bound=1.0)
    yield Row(scenario.name, "default", quality=float(ours.mean()), bound=1.0, more=more)


def _seeds(settings: Settings) -> int:
    return QUICK_SEEDS if settings.quick else SEEDS


STUDIES = (
    Study(
        title="Recorded counts",
        quality="busiest / mean",
        instances=lambda settings: recorded(settings.data, seeds=_seeds(settings)),
        rows=_rows,
        needs=SMARTMOE,
        note="Load of the busiest device over the mean, on the half of a recording that was not fitted, mean over 20"
        " ways to halve it. Low and high: 95 % interval over these; halves of one recording overlap.",
    ),
    Study(
        title="Counts like those of decoding DeepSeek-V3: 8 layers of 256 experts in 288 slots",
        quality="busiest / mean",
        instances=lambda settings: (decoding(*one, seeds=_seeds(settings)) for one in DECODING),
        rows=_rows,
        note="The same on steps that were not fitted, mean over 20 seeds of synthetic counts. A step is multinomial in"
        " shares whose logarithms drift from step to step (a first-order autoregression of this deviation).",
    ),
)
