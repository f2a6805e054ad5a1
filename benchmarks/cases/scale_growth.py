"""Growth at the size of a cluster: of a trace's tokens, and of solvers with layers, experts and devices.

--full: a billion tokens too, and every point of growth.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import psutil

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import contiguous, exflow, netmoe
from moeplan.solvers.flexmoe import Policy, follow

from ..race import cpu_s
from ..routing import markov
from ..study import Row, Settings, Study
from .flexmoe import COSTS
from .scale import EXPERTS, LAYERS, MOST_DEVICES, QUICK, TOP_K, USUAL, counted, peak_bytes, worker_numbers

FULL = 1_000_000_000
LIMIT_S = 40.0  # a curve of growth ends before the point that would take longer if it grew on as it did last
GROUP, TOKENS, RECORDS, APART = 8, 4096, 2, 10  # of flexmoe, one decision a layer: it holds for the last record


def _tokens(settings: Settings) -> list[int]:
    return [QUICK] if settings.quick else [USUAL, FULL] if settings.full else [USUAL]


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
        with peak_bytes() as peak:
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


STUDIES = (
    Study(
        title="Growth with tokens",
        quality="efficiency",
        instances=_tokens,
        rows=lambda tokens: counted(tokens, worker_numbers()[-1:]),
        note="Wall seconds of `trace count` by all workers: what a part holds is in memory, however many there are."
        f" DeepSeek-V3's shape: {LAYERS} layers x {EXPERTS} experts, top-{TOP_K}."
        " Seconds include the start of the workers. MB: resident memory of all processes together, at most.",
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
)
