"""Time and memory of `moeplan trace info` and `count` on large data sets, and whether the cost is linear in tokens.

Random routing of 26 layers x 64 experts, top-6, samples of 1,000 tokens, written by the real writer as part files into
a temporary folder; each command runs in a process of its own. --full: 20 million tokens (5 GB of disk).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter

from ..study import Row, Settings, Study

LAYERS, EXPERTS, TOP_K = 26, 64, 6
SAMPLE_TOKENS = 1000
BATCH_TOKENS = 50_000
QUICK, USUAL, FULL = 200_000, 2_000_000, 20_000_000
MAX_BYTES = 1.5e9


def _tokens(settings: Settings) -> list[int]:
    most = QUICK if settings.quick else FULL if settings.full else USUAL
    return [most // 4, most // 2, most]


def _rows(tokens: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        _write(trace, tokens)
        for name, args in (("info", ()), ("count", ("-o", str(Path(folder) / "counts")))):
            wall_s, cpu_s, peak = command("trace", name, str(trace), "--workers", "1", *args)
            assert peak <= MAX_BYTES, f"peak memory {peak / 1e9:.2f} GB; expected at most {MAX_BYTES / 1e9}"
            yield Row(
                f"{tokens:,} tokens", f"trace {name}", quality=cpu_s / tokens * 1e9, seconds=cpu_s,
                least_s=cpu_s, memory_bytes=peak, more={"wall, s": wall_s}, axis="tokens", size=tokens,
            )  # fmt: skip


def command(*args: str) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak resident bytes of a command of moeplan."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "moeplan.planner.cli", *args], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, args)
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def _write(folder: Path, tokens: int) -> None:
    """A trace whose every cell is one of 4,096 sets of distinct experts."""
    rng = np.random.default_rng(0)
    sets_SK = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint16), (4096, 1)), axis=1)[:, :TOP_K].copy()
    model = ModelSpec(name="large", layer_ids=tuple(range(1, LAYERS + 1)), num_experts=EXPERTS, top_k=TOP_K)
    with TraceWriter(folder, TraceMeta(form="tokens", model=model, recorder="benchmark")) as writer:
        for first in range(0, tokens, BATCH_TOKENS):
            row_T = np.arange(first, min(first + BATCH_TOKENS, tokens))
            writer.append(
                TokenBatch(
                    step=None,
                    sample=row_T // SAMPLE_TOKENS,
                    position=(row_T % SAMPLE_TOKENS).astype(np.int32),
                    source_rank=None,
                    phase=np.zeros(len(row_T), np.int8),
                    ids=sets_SK[rng.integers(len(sets_SK), size=(len(row_T), LAYERS))],
                )
            )


STUDIES = (
    Study(
        title="Commands on large traces",
        quality="CPU ns a token",
        note=f"{LAYERS} layers x {EXPERTS} experts, top-{TOP_K}. MB: the peak resident memory of the command's process,"
        f" which must stay below {MAX_BYTES / 1e9} GB.",
        instances=_tokens,
        rows=_rows,
    ),
)
