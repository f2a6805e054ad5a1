"""Time of importing and counting a trace, as ratios to plain NumPy in the same run, and how it grows with tokens.

Run: python benchmarks/traces.py [recording.npz]. By default gpt-oss-20b from ../shared/data or MOEPLAN_DATA; random
routing of the same shape where that is absent.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401  imports are not part of the times

from moeplan.traces.counts import count
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import open_trace

REAL = Path(os.environ.get("MOEPLAN_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
RECORDING = REAL / "gpt-oss-20b" / "routing.npz"
GROWTH = (0.25, 0.5, 1, 2, 4)
REPEATS = 3


def recording(path: Path) -> dict[str, Any]:
    """The arrays of a recording, or random ones where there is none."""
    if path.is_file():
        with np.load(path) as arrays:
            return dict(arrays)
    print(f"no recording at {path}: random routing instead")
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((137_957, 24, 32), dtype=np.float32), axis=-1)[..., :4].astype(np.uint8)
    weights = -np.sort(-rng.random(ids.shape, dtype=np.float32), axis=-1)
    return {"expert_ids": ids, "weights": weights.astype(np.float16), "num_experts": np.array(32)}


def resized(arrays: dict[str, Any], factor: float) -> dict[str, Any]:
    """The recording with `factor` times the tokens: a part of it, or repeated."""
    tokens = round(len(arrays["expert_ids"]) * factor)
    rows = np.arange(tokens) % len(arrays["expert_ids"])
    return {name: array[rows] if array.ndim else array for name, array in arrays.items()}


def load_arrays(path: Path) -> dict[str, Any]:
    """The baseline of importing: NumPy reads every array of the file."""
    with np.load(path) as arrays:
        return dict(arrays)


def naive_transitions(ids: Any, num_experts: int) -> Any:
    """The baseline of counting: `np.add.at` on arrays already in memory."""
    found = np.zeros((ids.shape[1] - 1, num_experts, num_experts), np.int64)
    for layer in range(ids.shape[1] - 1):
        np.add.at(found[layer], (ids[:, layer, 0], ids[:, layer + 1, 0]), 1)
    return found


def best_s(run: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(arrays: dict[str, Any], folder: Path) -> tuple[float, float, float, float]:
    """Seconds to load, import, count plainly and count a recording; the counts are compared."""
    source, attempt = folder / "recording.npz", iter(range(1000))
    np.savez_compressed(source, **arrays)
    load_s = best_s(lambda: load_arrays(source))
    import_s = best_s(lambda: import_trace(source, folder / f"trace{next(attempt)}"))
    trace = folder / f"trace{next(attempt) - 1}"
    experts = open_trace(trace).model.num_experts
    naive_s = best_s(lambda: naive_transitions(arrays["expert_ids"], experts))
    count_s = best_s(lambda: count(open_trace(trace)))
    if not np.array_equal(count(open_trace(trace)).transitions, naive_transitions(arrays["expert_ids"], experts)):
        raise SystemExit("the counts differ from the baseline's")
    return load_s, import_s, naive_s, count_s


def main() -> None:
    """Print a row a size."""
    arrays = recording(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING)
    print(f"{'tokens':>9}  {'import s':>8} {'/ np.load':>9} {'us/token':>8}", end="")
    print(f"  {'count s':>7} {'/ add.at':>8} {'us/token':>8}")
    for factor in GROWTH:
        part = resized(arrays, factor)
        with tempfile.TemporaryDirectory() as folder:
            load_s, import_s, naive_s, count_s = measure(part, Path(folder))
        tokens = len(part["expert_ids"])
        print(
            f"{tokens:>9,}  {import_s:>8.3f} {import_s / load_s:>9.2f} {import_s / tokens * 1e6:>8.2f}"
            f"  {count_s:>7.3f} {count_s / naive_s:>8.2f} {count_s / tokens * 1e6:>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
