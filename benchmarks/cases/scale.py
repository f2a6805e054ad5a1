"""Counting, placing and certifying at the size of a cluster; in one process, and in as many as there are cores.

A trace of DeepSeek-V3's shape: a part of random routing, which stands in the folder as often as its tokens are to be
counted. --full: a billion tokens too, by all workers, and every point of growth.
"""

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, eplb, exflow, netmoe
from moeplan.solvers.flexmoe import Policy, follow
from moeplan.traces.count_form import meta_of_counts, tabulate, write_counts
from moeplan.traces.model import ModelSpec
from moeplan.traces.reader import Trace, open_trace
from moeplan.traces.schema import TokenBatch, TraceMeta
from moeplan.traces.writer import TraceWriter
from moeplan.workers import opened

from ..race import cpu_s
from ..routing import markov
from ..study import Row, Settings, Study
from .flexmoe import COSTS
from .large_trace import command

LAYERS, EXPERTS, TOP_K = 58, 256, 8
PART_TOKENS = 70_000  # what the writer's 64 MiB hold
QUICK, USUAL, FULL = 500_000, 16_000_000, 1_000_000_000
DEVICES, SLOTS, STACK, STEPS = 64, 5, 61, 1000
EVERY_S = 0.1
LIMIT_S = 40.0  # a curve of growth ends before the point that would take longer if it grew on as it did last
GROUP, TOKENS, RECORDS, APART = 8, 4096, 2, 10  # of flexmoe, one decision a layer: it holds for the last record
MOST_DEVICES = 4096
CERTIFIED_S = 20.0  # that a plan on so many devices may take


def _workers() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return [1, *(number for number in (2, 4, 8, 16) if number <= cores)]


def _tokens(settings: Settings) -> list[int]:
    return [QUICK] if settings.quick else [USUAL, FULL] if settings.full else [USUAL]


def _counted(tokens: int) -> Iterator[Row]:
    """The trace counted by more and more workers; all counts must be the same bytes. The largest by the most alone."""
    numbers = _workers() if tokens < FULL else _workers()[-1:]
    with tempfile.TemporaryDirectory() as folder:
        trace, alone_s, first = _repeated(Path(folder, "trace"), tokens), None, b""
        for number in numbers:
            started = time.perf_counter()
            with opened(str(number)) as workers, _peak() as peak:
                tables = tabulate(trace, workers=workers)
                paths = write_counts(Path(folder, f"counts{number}"), meta_of_counts(trace), tables)
            seconds, written = time.perf_counter() - started, b"".join(path.read_bytes() for path in paths)
            alone_s, first = seconds if number == 1 else alone_s, first or written
            assert written == first
            yield Row(
                f"{trace.num_tokens:,} tokens", f"workers {number}",
                quality=None if alone_s is None else alone_s / seconds / number,
                seconds=seconds, memory_bytes=max(peak), axis="workers", size=number,
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
def _peak() -> Iterator[list[int]]:
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
    for number in _workers():
        with opened(str(number)) as workers, _peak() as peak:
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


Shape = tuple[int, int, int]  # layers, experts, devices
Solve = Callable[[], float]  # its cost over the bound


@dataclass(frozen=True, slots=True)
class Curve:
    """A solver's sizes along one axis, ascending."""

    method: str
    solved: Callable[[Shape], Solve]
    axis: str
    at: int  #: The axis' place in a shape
    shapes: tuple[Shape, ...]
    limit_s: float


def _curves(settings: Settings) -> Iterator[Curve]:
    few, limit_s = 2 if settings.quick else None, math.inf if settings.full else LIMIT_S
    deep, wide, large = (4, 8, 16, 32, 64), (64, 128, 256, 512), (64, 128, 256, 512, 1024, 2048, MOST_DEVICES)
    layers = tuple((number, 128, 64) for number in deep[:few])
    experts = tuple((4, number, 64) for number in wide[:few])
    devices = tuple((2, 512, number) for number in large[:few])
    for method, solved in {"exflow": _exflow, "netmoe": _netmoe, "flexmoe": _flexmoe}.items():
        yield Curve(method, solved, "layers L (E = 128, D = 64)", 0, layers, limit_s)
        yield Curve(method, solved, "experts E (L = 4, D = 64)", 1, experts, limit_s)
        yield Curve(method, solved, "devices D (L = 2, E = 512)", 2, devices, limit_s)


def _grown(curve: Curve) -> Iterator[Row]:
    """The points of a curve, until one would take too long; those after it without figures."""
    curve.solved(curve.shapes[0])()  # compiles
    seconds, growth = 0.0, 1.0
    for shape in curve.shapes:
        name = "L={} E={} D={}".format(*shape)
        if seconds * growth > curve.limit_s:
            yield Row(name, f"{curve.method}: left out")
            continue
        solve, before = curve.solved(shape), psutil.Process().memory_info().rss
        with _peak() as peak:
            started = cpu_s()
            quality = solve()
            took = cpu_s() - started
        seconds, growth = took, max(took / seconds, 1.0) if seconds else 1.0
        memory = max(max(peak) - before, 0) or None
        yield Row(
            name, curve.method, quality=quality, bound=1.0, seconds=seconds, memory_bytes=memory, axis=curve.axis,
            size=shape[curve.at],
        )  # fmt: skip


def _exflow(shape: Shape) -> Solve:
    """Hops that leave a device or node, by sweeps; replicas where there are more devices than experts."""
    layers, experts, devices = shape
    weights = markov(np.random.default_rng(0), layers, experts)

    def solve() -> float:
        found = exflow.solve(weights, _cluster(devices), slots=max(1, experts // devices), method="sweeps")
        return found.outcome.objective.value / (found.outcome.bound or np.nan)

    return solve


def _netmoe(shape: Shape) -> Solve:
    """Copies to other devices and nodes, of four samples a device, layer after layer."""
    layers, experts, devices = shape
    rng = np.random.default_rng(0)
    taste_IE = rng.dirichlet(np.full(experts, 3 / experts), 4 * devices)
    counts = [rng.multinomial(8 * 256, taste_IE) for _ in range(layers)]
    where = np.arange(experts) * devices // experts

    def solve() -> float:
        found = [netmoe.solve(one, where, _cluster(devices)) for one in counts]
        bound = sum(one.outcome.bound or np.nan for one in found)
        return sum(one.outcome.objective.value for one in found) / bound

    return solve


def _flexmoe(shape: Shape) -> Solve:
    """The busiest device over the mean in the last record, with one slot more than the experts need."""
    layers, experts, devices = shape
    rng = np.random.default_rng(0)
    share_LE = rng.dirichlet(np.full(experts, 0.5), layers)
    drawn = [[rng.multinomial(TOKENS, share_E, devices).T for share_E in share_LE] for _ in range(RECORDS)]
    counts, slots = np.array(drawn)[:, :, None], max(1, experts // devices) + 1
    start = contiguous.solve(layers, experts, _cluster(devices), slots=slots).placement.physical_to_logical
    table = start.astype(np.int64).reshape(layers, devices, slots)

    def solve() -> float:
        run = follow(counts, table, Policy(), COSTS, group=GROUP, steps=APART)
        return float(run.balance[-1].mean())

    return solve


def _cluster(devices: int) -> Cluster:
    return Cluster(devices // GROUP, GROUP)


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
        instances=_tokens,
        rows=_counted,
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
        title="Growth with layers, experts and devices",
        quality="over the bound",
        instances=_curves,
        rows=_grown,
        note="CPU seconds of solvers as model and cluster grow, up to 512 experts and 4,096 devices in nodes of 8."
        " One call a point, compiled; quality is what it leaves over the bound that it proves. exflow: hops, by sweeps,"
        " which have a budget of work and of time; balanced Markov transitions, rows Dirichlet(0.08); replicas where"
        " devices are more than experts. netmoe: copies of four samples a device, layer after layer. flexmoe: busiest"
        f" device over the mean in the last of {RECORDS} records of {TOKENS:,} pairs a device, with one slot more than"
        " the experts need, from contiguous experts. A curve ends before a point that would take over"
        f" {LIMIT_S:g} s if it grew on as it did last, unless all are asked for (--full)."
        " MB: growth of resident memory, looked at ten times a second.",
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
