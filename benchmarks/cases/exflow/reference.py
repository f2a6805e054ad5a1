"""Shares of the best known placements of random instances (`exflow_reference.json`) that a budget reaches."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from moeplan.planner.figures import percent

from ...exflow_reference import CLASSES, FILE, SEEDS, instance
from ...study import Row, Settings, Study
from .trail import Trail, annealed, swept

BUDGET_S = 10.0
LONG = ("24x64x16", 120.0)  # with --full
FEW = (0, 4, 9)  # seeds: rows Dirichlet(0.03), (0.083) and (0.3); all with --full
CLOSE = 0.995  # of the best known


@dataclass(frozen=True, slots=True)
class Known:
    """The instances of a class whose best share is known, by seed, how many of them proven, and a budget."""

    name: str
    shares: dict[int, float]
    num_optimal: int
    budget_s: float

    @classmethod
    def of(cls, path: Path, name: str, seeds: Iterable[int], budget_s: float) -> "Known":
        """Best known placements of a file, among some seeds."""
        best = json.loads(path.read_text())
        there = {seed: best[f"{name}/{seed}"] for seed in seeds if f"{name}/{seed}" in best}
        shares = {seed: one["share"] for seed, one in there.items()}
        return cls(name, shares, sum(one["optimal"] for one in there.values()), budget_s)


def known(settings: Settings) -> list[Known]:
    """The classes to solve, those without a known share left out."""
    if settings.quick:
        return [Known.of(FILE, CLASSES[0], FEW, 0.5)]
    asked = [*((name, BUDGET_S) for name in CLASSES), *((LONG,) if settings.full else ())]
    seeds = range(SEEDS) if settings.full else FEW
    found = [Known.of(FILE, name, seeds, budget_s) for name, budget_s in asked]
    return [one for one in found if one.shares]


def rows(case: Known) -> Iterator[Row]:
    """Sweeps and annealing, means and worst over the instances."""
    num_devices, weights = int(case.name.split("x")[2]), [instance(case.name, seed) for seed in case.shares]
    sweeps = [swept(one, num_devices) for one in weights]
    annealing = [annealed(one, num_devices, case.budget_s) for one in weights]
    yield _row(case, "sweeps", sweeps, sweeps)
    yield _row(case, f"annealing {case.budget_s:g} s", annealing, sweeps)


def _row(case: Known, method: str, found: list[Trail], sweeps: list[Trail]) -> Row:
    reached = [trail.kept / share for trail, share in zip(found, case.shares.values(), strict=True)]
    more = {
        "least, %": min(reached),
        f"at {percent(CLOSE, 1)} or more": sum(share >= CLOSE for share in reached),
        "instances": len(reached),
        "of them proven": case.num_optimal,
        "below the sweeps": sum(one.kept < other.kept for one, other in zip(found, sweeps, strict=True)),
    }
    seconds = fmean(trail.seconds for trail in found)
    return Row(case.name, method, quality=fmean(reached), seconds=seconds, least_s=seconds, more=more)


STUDIES = (
    Study(
        title="Share of the best known",
        quality="mean share of the best known share, %",
        note="How near each method comes to the best placement known, on random transitions. "
        "Balanced Markov transitions, rows Dirichlet(0.03 ... 0.3), in classes of layers x experts x devices;"
        " best known as in `benchmarks/exflow_reference.json`, with the budgets that found them. A proven one"
        " is the optimum, another may be exceeded. Annealing of 120 s begins with what sweeps find. Seconds are means.",
        instances=known,
        rows=rows,
    ),
)
