"""Bounds on the hops that any placement keeps: how far above a placement that was found, kind by kind, at what cost.

Legend: W transitions `[L-1, E, E]`; L MoE layers; E experts; D devices.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.bounds import row_bound, spectral_bound, thorough_bound, transportation_bound

from ..exflow_reference import instance
from ..race import cpu_s
from ..routing import GPT_OSS, gpt_oss
from ..study import Row, Settings, Study

Array = np.ndarray
DEVICES = (4, 8, 16)
CLASSES = ("12x8x4", "8x16x4", "24x32x8")
SEEDS = (0, 4, 9)  # rows Dirichlet(0.03), (0.083) and (0.3)
PAIRWISE = {"row": row_bound, "spectral": spectral_bound, "transportation": transportation_bound}


@dataclass(frozen=True, slots=True)
class _Case:
    """Transitions W, the devices, and seconds for the search and the thorough bound."""

    name: str
    weights: Callable[[], Array]
    num_devices: int
    search_s: float
    bound_s: float


def _real(settings: Settings) -> Iterator[_Case]:
    def even() -> Array:
        routing = gpt_oss(settings.data)
        return routing.transitions(routing.even())

    limits = (3.0, 20.0) if settings.quick else (20.0, 600.0)
    for devices in DEVICES[2 if settings.quick else 0 :]:
        yield _Case(f"gpt-oss-20b D={devices}", even, devices, *limits)


def _dirichlet(settings: Settings) -> Iterator[_Case]:
    limits = (1.0, 10.0) if settings.quick else (10.0, 120.0)
    for name in CLASSES[: 1 if settings.quick else None]:
        for seed in SEEDS:
            yield _Case(f"{name} seed {seed}", partial(instance, name, seed), int(name.split("x")[2]), *limits)


def _rows(case: _Case) -> Iterator[Row]:
    weights = case.weights()
    found = exflow.solve(weights, Cluster(1, case.num_devices), time_limit_s=case.search_s).outcome
    kept, slots = found.objective.value, np.full(case.num_devices, weights.shape[1] // case.num_devices)
    for kind, bound in PAIRWISE.items():
        values = partial(map, partial(bound, slots=slots), weights)
        yield _row(case, kind, kept, weights, lambda values=values: sum(values()))  # type: ignore[misc]
    thorough = partial(thorough_bound, weights, slots, kept=kept * weights.sum())
    thorough(time_limit_s=0.1)  # compiled by then
    yield _row(case, "three-layer", kept, weights, lambda: thorough(time_limit_s=case.bound_s).value)


def _row(case: _Case, kind: str, kept: float, weights: Array, bound: Callable[[], float]) -> Row:
    started, used = time.perf_counter(), cpu_s()
    share = bound() / float(weights.sum())
    seconds, elapsed_s = cpu_s() - used, time.perf_counter() - started
    more = {"gap, %": 1 - kept / share, "elapsed, s": elapsed_s}
    return Row(case.name, kind, quality=kept, bound=share, seconds=seconds, more=more)


NOTE = (
    "Seconds are CPU time of all threads, compilation apart. The three-layer bound stops where it meets what is kept,"
)
STUDIES = (
    Study(
        title="Dirichlet",
        quality="hops kept, %",
        note="How far each kind of bound lies above the hops that a placement keeps, on random transitions. "
        f"{NOTE} or after 120 s; placements by 10 s of annealing. Classes are layers x experts x devices.",
        instances=_dirichlet,
        rows=_rows,
    ),
    Study(
        title="Real routing",
        quality="hops kept, %",
        note="How far each kind of bound lies above the hops that a placement keeps, on gpt-oss-20b. "
        f"{NOTE} or after 600 s; even sample ids, placements by 20 s of annealing.",
        needs=GPT_OSS,
        instances=_real,
        rows=_rows,
    ),
)
