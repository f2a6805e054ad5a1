"""Errors of fits on held-out sizes of published tables, for every kind of model, with the seconds they cost."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moeplan.profilers import profile as profiles
from moeplan.profilers.predictor import predict
from moeplan.profilers.profile import Profile
from moeplan.profilers.tables import read_tables

from ..race import Call, race
from ..study import Row, Settings, Study

TABLES = "gpu-measurements"
NUM_PREDICTIONS = 100_000

System = tuple[Path, str]


def _systems(settings: Settings) -> list[System]:
    folder = settings.data / TABLES
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return [(folder, name) for name in names[: 1 if settings.quick else None]]


def _errors(system: System) -> Iterator[Row]:
    profile = _read(*system)
    for key, series in profile.series.items():
        assert series.fit is not None
        for kind, held in series.fit.held_out.items():
            chosen = " *" if kind == series.fit.model.kind else ""
            more = {"sizes": held.num_sizes, "p95, %": held.p95_error, "worst, %": held.worst_error}
            yield Row(f"{system[1]} {key}", kind + chosen, quality=held.median_error, more=more)
    yield from _pooled(system[1], profile)


def _pooled(system: str, profile: Profile) -> Iterator[Row]:
    """All-to-all over all numbers of GPUs: its series list every held-out size."""
    for kind in ("chosen", "alpha_beta"):
        errors = [
            error
            for series in profile.series.values()
            if series.case == "all_to_all" and series.fit
            for error in series.fit.held_out[series.fit.model.kind if kind == "chosen" else kind].errors
        ]
        if errors:
            more = {"sizes": len(errors), "p95, %": float(np.quantile(errors, 0.95)), "worst, %": max(errors)}
            yield Row(f"{system} all_to_all, pooled", kind, quality=float(np.median(errors)), more=more)


def _costs(system: System) -> Iterator[Row]:
    profile = _read(*system)
    m, n, k = np.random.default_rng(0).integers(1, 16_384, (3, NUM_PREDICTIONS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        profiles.save(profile, path)
        calls: dict[str, Call] = {
            "read and fit": lambda: read_tables(*system),
            "load profile": lambda: profiles.load(path),
        }
        if "gemm/bf16" in profile.series:
            sizes = {"m": m, "n": n, "k": k}
            calls[f"predict {NUM_PREDICTIONS:,}"] = lambda: predict(profile, "gemm", sizes, dtype="bf16")
        for method, timing in race(calls, "read and fit", rounds=1, memory=False).items():
            yield Row(system[1], method, **timing.figures)


@functools.cache
def _read(folder: Path, system: str) -> Profile:
    return read_tables(folder, system)


STUDIES = (
    Study(
        title="Errors on sizes held out",
        quality="median error, %",
        note="* the kind that was chosen, by cross-validation on the other sizes.",
        needs=TABLES,
        instances=_systems,
        rows=_errors,
    ),
    Study(title="Seconds", quality="none", baseline="read and fit", needs=TABLES, instances=_systems, rows=_costs),
)
