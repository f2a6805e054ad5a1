"""Time and memory of `moeplan trace info` and `count` on large data sets, and whether the cost is linear in tokens.

Random routing of 26 layers x 64 experts, top-6, samples of 1,000 tokens, written by the real writer as part files into
a temporary folder; each command runs in a process of its own, whose peak memory is the figure of the kernel.

Run: python benchmarks/large_trace.py [--tokens 2000000 | --full], which is 20 million (5 GB of disk).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from moeplan.traces.model import ModelSpec
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter

LAYERS, EXPERTS, TOP_K = 26, 64, 6
SAMPLE_TOKENS = 1000
BATCH_TOKENS = 50_000
FULL = 20_000_000
MAX_BYTES = 1.5e9


def write(folder: Path, tokens: int) -> None:
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


def run(*args: str) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak resident bytes of a command of moeplan."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "moeplan.planner.cli", *args], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"moeplan {' '.join(args)} failed with {process.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(tokens: int) -> dict[str, float]:
    """Write a trace and print a row a command; the CPU seconds of each."""
    cpu = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        write(trace, tokens)
        for name, args in (("info", ()), ("count", ("-o", str(Path(folder) / "counts")))):
            wall_s, cpu[name], peak = run("trace", name, str(trace), *args)
            row = f"{tokens:>12,}  {f'trace {name}':<12} {wall_s:>7.1f} {cpu[name]:>7.1f} {tokens / wall_s:>11,.0f}"
            print(f"{row} {cpu[name] / tokens * 1e9:>12.0f} {peak / 1e6:>8.0f}", flush=True)
            if peak > MAX_BYTES:
                raise SystemExit(f"peak memory above {MAX_BYTES / 1e9} GB")
    return cpu


def main() -> None:
    """Print a row a command at a quarter of the tokens, a half and all, and what each token more costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--full", action="store_true", help=f"{FULL:,} tokens")
    options = parser.parse_args()
    tokens = FULL if options.full else options.tokens
    sizes = (tokens // 4, tokens // 2, tokens)
    print(f"{'tokens':>12}  {'command':<12} {'s':>7} {'CPU s':>7} {'tokens/s':>11} {'CPU ns/token':>12} {'peak MB':>8}")
    found = [measure(size) for size in sizes]
    for name in found[0]:
        steps = zip(sizes, sizes[1:], found, found[1:], strict=False)
        marginal = [(b[name] - a[name]) / (after - before) * 1e9 for before, after, a, b in steps]
        print(f"trace {name}: a token more costs {marginal[0]:.0f}, then {marginal[1]:.0f} CPU ns; linear where alike")


if __name__ == "__main__":
    main()
