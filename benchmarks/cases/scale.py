"""Counting, placing and certifying at the size of a cluster; in one process, and in as many as there are cores."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import eplb
from moeplan.traces.count_form import meta_of_counts, tabulate, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter
from moeplan.workers import opened

from ..study import Row, Study
from .large_trace import command

LAYERS, EXPERTS, TOP_K = 58, 256, 8
PART_TOKENS = 70_000  # what the writer's 64 MiB hold
QUICK, USUAL = 500_000, 16_000_000
DEVICES, SLOTS, STACK, STEPS = 64, 5, 61, 1000
EVERY_S = 0.1
MOST_DEVICES = 4096
CERTIFIED_S = 20.0  # that a plan on so many devices may take


def worker_numbers() -> list[int]:
    """Numbers of workers to compare: one, and doubled as long as each has a core."""
    cores = len(os.sched_getaffinity(0))
    return [1, *(number for number in (2, 4, 8, 16) if number <= cores)]


def counted(tokens: int, numbers: Sequence[int]) -> Iterator[Row]:
    """Count a trace of DeepSeek-V3's shape by such numbers of workers; all counts must be the same bytes.

    It is a part of random routing, which stands in the folder as often as its tokens are to be counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace, alone_s, first = _repeated(Path(folder, "trace"), tokens), None, b""
        for number in numbers:
            started = time.perf_counter()
            with opened(str(number)) as workers, peak_bytes() as peak:
                tables = tabulate(trace, workers=workers)
                paths = write_counts(Path(folder, f"counts{number}"), meta_of_counts(trace), tables)
            seconds, written = time.perf_counter() - started, b"".join(path.read_bytes() for path in paths)
            alone_s, first = seconds if number == 1 else alone_s, first or written
            assert written == first
            yield Row(
                f"{trace.num_tokens:,} tokens", f"workers {number}",
                quality=None if alone_s is None else alone_s / seconds / number,
                seconds=seconds, memory_bytes=max(peak),
                more={"M token-layers per second and worker": trace.num_tokens * LAYERS / seconds / number / 1e6},
            )  # fmt: skip


def _repeated(folder: Path, tokens: int) -> Trace:
    """A trace of one part under as many names."""
    rng = np.random.default_rng(0)
    sets_SK = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint16), (4096, 1)), axis=1)[:, :TOP_K].copy()
    model = ModelSpec(name="large", layer_ids=tuple(range(3, 3 + LAYERS)), num_experts=EXPERTS, top_k=TOP_K)
    with TraceWriter(folder, TraceMeta(form="tokens", model=model, recorder="benchmark")) as writer:
        writer.append(
            TokenBatch(
                step=np.zeros(PART_TOKENS, np.int32),
                sample=None,
                position=np.arange(PART_TOKENS, dtype=np.int32),
                source_rank=None,
                phase=np.zeros(PART_TOKENS, np.int8),
                ids=sets_SK[rng.integers(len(sets_SK), size=(PART_TOKENS, LAYERS))],
            )
        )
    part = next(folder.glob("*.parquet"))
    for number in range(1, max(1, tokens // PART_TOKENS)):
        os.link(part, folder / f"part-{number}-0-0.parquet")
    return open_trace(folder)


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Resident bytes of this process and of those that it started, all together, looked at ten times a second."""
    seen, over, me = [0], threading.Event(), psutil.Process()

    def look() -> None:
        while not over.wait(EVERY_S):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            seen.append(total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _placed(steps: int) -> Iterator[Row]:
    """The layers refined for the steps by more and more workers; all placements must be the same."""
    rng = np.random.default_rng(0)
    share_LE = rng.dirichlet(np.full(EXPERTS, 0.5), STACK)
    loads_BLE = np.stack([rng.multinomial(8 * 4096, share_E, steps) for share_E in share_LE], axis=1)
    cluster, alone_s, first = Cluster(DEVICES // 8, 8), 0.0, None
    eplb.solve(loads_BLE[:2, :2], cluster, slots=SLOTS)  # compiles
    for number in worker_numbers():
        with opened(str(number)) as workers, peak_bytes() as peak:
            list(workers.map(eplb.solve, [(loads_BLE[:2, :2], cluster)] * number))  # starts and loads
            started = time.perf_counter()
            placed = eplb.solve(loads_BLE, cluster, slots=SLOTS, workers=workers)
            seconds = time.perf_counter() - started
        alone_s, first = alone_s or seconds, placed if first is None else first
        assert np.array_equal(placed.placement.physical_to_logical, first.placement.physical_to_logical)
        yield Row(
            f"{STACK} layers, {steps:,} steps", f"workers {number}", quality=alone_s / seconds / number,
            seconds=seconds, memory_bytes=max(peak), axis="workers", size=number,
            more={"core seconds": seconds * number, "balance": placed.outcome.objective.value},
        )  # fmt: skip


def _certified(strategy: str) -> Iterator[Row]:
    """A plan of the shipped recording on the most devices, solved and certified in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        trace, plan = os.path.join(folder, "trace"), os.path.join(folder, "plan.json")
        command("trace", "example", "gpt-oss-20b", "-o", trace)
        cluster = f"1x{MOST_DEVICES}"
        asked = ("--strategy", strategy, "--trace", trace, "--cluster", cluster, "--slots", "1", "-o", plan)
        for name, args in (("solve", asked), ("certify", (plan, "--trace", trace))):
            wall_s, own_s, peak = command(name, *args)
            bound = CERTIFIED_S if name == "certify" else None
            yield Row(
                f"{strategy} on {cluster}", name, quality=wall_s, seconds=own_s, memory_bytes=peak,
                more={} if bound is None else {"wanted, s": bound},
            )  # fmt: skip


STUDIES = (
    Study(
        title="Counting a trace",
        quality="efficiency",
        instances=lambda settings: [QUICK if settings.quick else USUAL],
        rows=lambda tokens: counted(tokens, worker_numbers()),
        note="Wall seconds of `trace count` by number of worker processes, and those of one over N times those of N."
        f" {LAYERS} layers x {EXPERTS} experts, top-{TOP_K}; one part of {PART_TOKENS:,} tokens under many names,"
        " by step. Seconds include the start of the workers. MB: resident memory of all processes together, at most.",
    ),
    Study(
        title="EPLB by steps",
        quality="efficiency",
        instances=lambda settings: [50 if settings.quick else STEPS],
        rows=_placed,
        note="Wall seconds of a placement that is refined for every step, by number of worker processes."
        f" {STACK} layers x {EXPERTS} experts, {SLOTS} slots on each of {DEVICES} devices; loads of 4,096 tokens"
        " (top-8) drawn from a share of each expert. Without compilation and the start of workers.",
    ),
    Study(
        title="Certifying a plan on 4,096 devices",
        quality="wall, s",
        instances=lambda settings: ["contiguous"] if settings.quick else ["contiguous", "eplb"],
        rows=_certified,
        note="Seconds of `solve` and `certify` as commands, start of Python included. gpt-oss-20b's recording (43,916"
        " tokens, 24 layers x 32 experts, top-4), one slot on each of 4,096 devices in one node.",
    ),
)
