"""Importing and counting a trace as ratios to plain NumPy in the same run, and how it grows with tokens.

gpt-oss-20b where the real data is there; random routing of the same shape where it is absent.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet  # noqa: F401  imports are not part of the times

from moeplan.traces.counts import count
from moeplan.traces.importers import import_trace
from moeplan.traces.reader import open_trace

from ..race import Call, race
from ..routing import GPT_OSS
from ..study import Row, Settings, Study

GROWTH = (0.25, 0.5, 1, 2)


def _parts(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """The recording with some times the tokens: a part of it, or repeated."""
    name, arrays = _recording(settings.data / GPT_OSS)
    for factor in GROWTH[: 1 if settings.quick else None]:
        rows = np.arange(round(len(arrays["expert_ids"]) * factor)) % len(arrays["expert_ids"])
        yield name, {key: array[rows] if array.ndim else array for key, array in arrays.items()}


def _rows(instance: tuple[str, dict[str, Any]]) -> Iterator[Row]:
    """Both jobs; the counts are compared."""
    name, arrays = instance
    tokens = len(arrays["expert_ids"])
    with tempfile.TemporaryDirectory() as folder:
        source, number = Path(folder, "recording.npz"), itertools.count()
        np.savez_compressed(source, **arrays)
        imports: dict[str, Call] = {
            "np.load": lambda: _load(source),
            "import": lambda: import_trace(source, Path(folder, f"trace{next(number)}")),
        }
        jobs = [("import", race(imports, "np.load", rounds=3, memory=False))]
        trace = Path(folder, "trace0")
        experts = open_trace(trace).model.num_experts
        counts: dict[str, Call] = {
            "np.add.at": lambda: _transitions(arrays["expert_ids"], experts),
            "count": lambda: count(open_trace(trace)).transitions,
        }
        jobs.append(("count", race(counts, "np.add.at", rounds=3, memory=False)))
    naive, ours = (timing.value for timing in jobs[1][1].values())
    if not np.array_equal(naive, ours):
        raise AssertionError("the counts differ from the baseline's")
    for job, timings in jobs:
        for method, timing in timings.items():
            each_us, axis = timing.seconds / tokens * 1e6, f"tokens, {job}"
            yield Row(f"{name} {tokens:,}", method, quality=each_us, axis=axis, size=tokens, **timing.figures)


def _recording(path: Path) -> tuple[str, dict[str, Any]]:
    """The arrays of a recording, or random ones where there is none."""
    if path.is_file():
        return "gpt-oss-20b", _load(path)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((137_957, 24, 32), dtype=np.float32), axis=-1)[..., :4].astype(np.uint8)
    weights = -np.sort(-rng.random(ids.shape, dtype=np.float32), axis=-1)
    return "random", {"expert_ids": ids, "weights": weights.astype(np.float16), "num_experts": np.array(32)}


def _load(path: Path) -> dict[str, Any]:
    """The baseline of importing: NumPy reads every array of the file."""
    with np.load(path) as arrays:
        return dict(arrays)


def _transitions(ids: Any, num_experts: int) -> Any:
    """The baseline of counting: `np.add.at` on arrays already in memory."""
    found = np.zeros((ids.shape[1] - 1, num_experts, num_experts), np.int64)
    for layer in range(ids.shape[1] - 1):
        np.add.at(found[layer], (ids[:, layer, 0], ids[:, layer + 1, 0]), 1)
    return found


STUDIES = (
    Study(
        title="Importing and counting",
        quality="us a token",
        baseline="np.load, np.add.at",
        note="Importing beside NumPy reading the same file, counting beside `np.add.at` on arrays in memory; the counts"
        " must be equal. 24 layers, top-4.",
        instances=_parts,
        rows=_rows,
    ),
)
