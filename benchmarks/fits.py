"""Errors of fits on held-out sizes of published tables, for every kind of model, with the seconds they cost.

Run: python benchmarks/fits.py [--data DIR] [--systems NAME ...] [--worst N]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from moeplan.profilers import profile as profiles
from moeplan.profilers.predictor import predict
from moeplan.profilers.profile import Profile
from moeplan.profilers.series import Series
from moeplan.profilers.tables import read_tables

DEFAULT_DATA = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[2] / "shared" / "data")
NUM_PREDICTIONS = 100_000


def main() -> None:
    """Print a table a system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--systems", nargs="*", default=None)
    parser.add_argument("--worst", type=int, default=3, help="worst sizes to list a series")
    options = parser.parse_args()
    folder = options.data / "gpu-measurements"
    there = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not there:
        print(f"no published tables at {folder}")
    for system in options.systems or there:
        started = time.perf_counter()
        profile = read_tables(folder, system)
        print(f"\n{profile.origins[0].name}: read and fitted in {time.perf_counter() - started:.1f} s")
        _errors(profile)
        _pooled(profile)
        _worst(profile, options.worst)
        _costs(profile)


def _errors(profile: Profile) -> None:
    print(f"{'series':34} {'kind':17} {'sizes':>7} {'median':>8} {'p95':>8} {'worst':>8}   * chosen")
    for key, series in profile.series.items():
        assert series.fit is not None
        for kind, held in series.fit.held_out.items():
            mark = "*" if kind == series.fit.model.kind else ""
            print(
                f"{key:34} {kind:17} {held.num_sizes:7} {held.median_error:8.1%} {held.p95_error:8.1%}"
                f" {held.worst_error:8.1%} {mark}"
            )


def _pooled(profile: Profile) -> None:
    """All-to-all over all numbers of GPUs: its series list every held-out size."""
    for kind in ("chosen", "alpha_beta"):
        errors = [
            error
            for series in profile.series.values()
            if series.case == "all_to_all" and series.fit
            for error in series.fit.held_out[series.fit.model.kind if kind == "chosen" else kind].errors
        ]
        if errors:
            print(f"all_to_all pooled, {kind}: median {np.median(errors):.1%}, worst {max(errors):.1%}")


def _worst(profile: Profile, count: int) -> None:
    for key, series in profile.series.items():
        assert series.fit is not None
        held = series.fit.held_out[series.fit.model.kind]
        sizes = [_named(series, size) for size in held.sizes[:count]]
        print(
            f"worst of {key}: "
            + "; ".join(f"{size} {error:.0%}" for size, error in zip(sizes, held.errors, strict=False))
        )


def _named(series: Series, size: tuple[int, ...]) -> str:
    assert series.fit is not None
    return " ".join(f"{axis} {value}" for axis, value in zip(series.fit.axes, size, strict=True))


def _costs(profile: Profile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiles.save(profile, path)
        started = time.perf_counter()
        loaded = profiles.load(path)
        print(f"profile of {path.stat().st_size / 2**20:.1f} MiB loads in {time.perf_counter() - started:.2f} s")
    if "gemm/bf16" in loaded.series:
        m, n, k = np.random.default_rng(0).integers(1, 16_384, (3, NUM_PREDICTIONS))
        started = time.perf_counter()
        predict(loaded, "gemm", {"m": m, "n": n, "k": k}, dtype="bf16")
        print(f"{NUM_PREDICTIONS:,} GEMMs of as many layers predicted in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
