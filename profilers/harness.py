"""The measuring harness: the grid of a run and the loop over it, the same on every rank and for every case.

Each size is run once to warm up and its answer checked; then timed call by call until its median is known well
(`sampling.py`) or its share of the time is spent; then the last answer is checked too. Where the ranks lie on several
nodes, the collectives are also run inside each node, on all nodes at once. A full run measures every case in its most
wanted dtype before any in the next. Other runs measure that one only and have a fixed time: each series, and where a
case measures whole curves each of these, is measured at its smallest and largest size first, then between them, so that
sizes left out are spread over all.
"""

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..errors import RankError
from ..files import sha256_json
from .cases.case import Case
from .measurement import PAIR, Measurement, Size
from .origin import Environment, GridName
from .sampling import Clock, clock_for, sample, slowest, timed
from .series import LinkKind, series_key
from .stopwatch import stopwatch
from .topology import numbered
from .world import World
from .world.launch import Terms

BUDGET_S: Mapping[GridName, float] = {"quick": 0.5, "default": 0.8, "full": 0.8}  # of a size
#: Of all sizes; the rest of a minute (quick) or two (default) is for starting ranks and fitting
TOTAL_S: dict[GridName, float] = {"quick": 24.0, "default": 75.0, "full": math.inf}
REFERENCE_SIDE, REFERENCE_CALLS = 192, 3  # of the matrices whose product tells how quiet the machine is


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a measurement: a size of the series of a case in a dtype on some ranks."""

    case: str
    dtype: str
    ranks: int
    link: LinkKind | None
    size: tuple[tuple[str, int], ...]

    @property
    def key(self) -> str:
        """The key of the series in a profile."""
        return series_key(self.case, self.dtype, self.ranks, self.link)


@dataclass(frozen=True, slots=True)
class Request:
    """Cases to measure, without the places that are `done` already (as rank 0 has them)."""

    cases: tuple[Case, ...]
    grid: GridName = "default"
    done: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """The first report of rank 0: where the ranks run, and the work of every place of the whole grid."""

    environment: Environment
    hosts: tuple[str, ...]
    grid: Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class Step:
    """A report of rank 0: one size measured, `done` of `total`, with seconds to go and a sample of the reference."""

    place: Place
    measurement: Measurement
    reference_s: float
    done: int
    total: int
    remaining_s: float

    @property
    def case(self) -> str:
        """The name of the case."""
        return self.place.case


@dataclass(frozen=True, slots=True)
class _Job:
    """A size to measure on all ranks or on those of a node; the dtypes of a case take turns."""

    turn: int
    depth: int  #: 0 at the ends of its series' sizes, 1 halfway between, and so on
    case: Case
    world: World
    size: Size
    place: Place

    @property
    def work(self) -> int:
        """Units of work of a rank."""
        return self.case.work(self.size, self.place.ranks)


@dataclass(slots=True)
class _Call:
    """A call at the size of a job, on inputs of its own."""

    job: _Job
    inputs: Any
    output: Any = None

    @classmethod
    def of(cls, job: _Job) -> "_Call":
        """A call that has been made once, and whose answer was right, else RankError."""
        call = cls(job, job.case.prepare(job.size, job.place.dtype, job.world))
        call()
        call.check()
        return call

    def __call__(self) -> None:
        self.output = self.job.case.run(self.inputs)

    def check(self) -> None:
        """Refuse a wrong answer of the last call by a RankError."""
        job = self.job
        if wrong := job.case.check(self.inputs, self.output, job.world):
            at = ", ".join(f"{name} {value}" for name, value in job.size.items())
            raise RankError(f"{job.case.name} at {at} gave a wrong answer: {wrong}; its figures would mean nothing")


class Interleaved:
    """The sizes of a request, timed one call each between other work: load that comes and goes hits both alike.

    A case with laps (`stopwatch`) counts their sum, of each the slowest rank's; any other the whole call.
    """

    def __init__(self, world: World, request: Request) -> None:
        self._world, self._clock = world, clock_for(world.device)
        self._timed = [(_Call.of(job), list[float]()) for job in _jobs(request, world, None)]

    def once(self) -> None:
        """Time one call of each size, the slowest rank's."""
        for call, samples_s in self._timed:
            with stopwatch() as laps:
                whole_s = timed(self._clock, call, 1)
            samples_s.append(sum(slowest([*chain(*laps.values())] or whole_s)))

    def reports(self) -> Iterator[Start | Step]:
        """Reports of rank 0, of all calls together."""
        reference, count = _reference(self._world), len(self._timed)
        yield Start(
            Environment.of(self._world.device, self._world.hosts),
            self._world.hosts,
            {call.job.place: call.job.work for call, _ in self._timed},
        )
        for index, (call, samples_s) in enumerate(self._timed):
            call.check()
            measurement = Measurement.of(call.job.size, call.job.work, samples_s)
            yield Step(call.job.place, measurement, _least_s(self._clock, reference), index + 1, count, 0.0)


def terms(world: World, request: Request) -> Terms:
    """Terms that the ranks of a launched world must agree on, by name."""
    from importlib.metadata import version

    return {
        "version": version("moeplan"),
        "device": world.device.partition(":")[0],
        "grid": request.grid,
        "cases": ", ".join(case.name for case in request.cases),
        "dtypes": ", ".join(f"{case.name} {'/'.join(case.dtypes(world.device))}" for case in request.cases),
        "sizes": sha256_json([[job.place.key, job.place.size] for job in _jobs(request, world, None)])[:16],
        "timeout": f"{world.timeout_s:g} s",
    }


def measure_cases(world: World, request: Request) -> None:
    """Measure every case that suits this world; rank 0 reports a `Start` and then each `Step` as it comes.

    Raises
    ------
    RankError
        This rank got a wrong answer.
    """
    node = world.of_node() if len(set(world.hosts)) > 1 else None
    grid = sorted(_jobs(request, world, node), key=lambda job: (job.turn, job.depth))
    if world.rank == 0:
        works = {job.place: job.work for job in grid}
        world.report(Start(Environment.of(world.device, world.hosts), world.hosts, works))
    done = _from_rank_0(request.done)
    missing = [job for job in grid if job.place not in done]
    clock, reference, start = clock_for(world.device), _reference(world), time.perf_counter()
    for index, job in enumerate(missing):
        reference_s = _least_s(clock, reference)
        reference_s, elapsed_s = slowest([reference_s, time.perf_counter() - start])
        if elapsed_s > TOTAL_S[request.grid]:
            break
        samples = _samples(job, clock, _budget_s(request, elapsed_s, len(missing) - index))
        if world.rank == 0:
            measured, to_go = index + 1, len(missing) - index - 1
            measurement = Measurement.of(job.size, job.work, samples)
            remaining_s = (time.perf_counter() - start) / measured * to_go
            world.report(Step(job.place, measurement, reference_s, len(grid) - to_go, len(grid), remaining_s))


def _jobs(request: Request, world: World, node: World | None) -> Iterator[_Job]:
    """The grid: each case in this world and, where it is a collective of no single pair, inside the node."""
    for case in request.cases:
        for inside in (world, node):
            if inside is None or inside.size < case.min_ranks or (inside is node and case.min_ranks == 1):
                continue
            dtypes = case.dtypes(inside.device)
            for turn, dtype in enumerate(dtypes if request.grid == "full" else dtypes[:1]):
                sizes = case.sizes(inside, quick=request.grid == "quick")
                depths = [0] * len(sizes) if request.grid == "full" else _depths_along(case.curve, sizes)
                for depth, size in zip(depths, sizes, strict=True):
                    if inside is world or PAIR[0] not in size:
                        yield _Job(turn, depth, case, inside, size, _place(case, dtype, size, inside))


def _depths_along(curve: str | None, sizes: Sequence[Size]) -> list[int]:
    """Depth of each size among those of its curve, which differ along one axis; without curves among all.

    A curve that was measured at one size only would take the slope of its neighbours.
    """
    curves, depths = defaultdict[object, list[int]](list), [0] * len(sizes)
    for at, size in enumerate(sizes):
        curves[curve and tuple(sorted(size.items() - {(curve, size[curve])}))].append(at)
    for places in curves.values():
        for at, depth in zip(places, _depths(len(places)), strict=True):
            depths[at] = depth
    return depths


def _depths(count: int) -> list[int]:
    """Halvings of a range of so many that lead to each: 0 at its ends, 1 halfway between, and so on."""
    depths, spans, depth = [0] * count, [(0, count - 1)], 0
    while spans := [(low, high) for low, high in spans if high - low > 1]:
        depth += 1
        middles = [(low + high) // 2 for low, high in spans]
        for middle in middles:
            depths[middle] = depth
        spans = [half for (low, high), at in zip(spans, middles, strict=True) for half in ((low, at), (at, high))]
    return depths


def _place(case: Case, dtype: str, size: Size, world: World) -> Place:
    ranks = 1
    link: LinkKind | None = None
    if case.min_ranks > 1:
        together = [size[name] for name in PAIR] if PAIR[0] in size else range(world.size)
        nodes = {numbered(world.hosts)[rank] for rank in together}
        ranks, link = len(together), "intra" if len(nodes) == 1 else "inter"
    return Place(case.name, dtype, ranks, link, tuple(sorted(size.items())))


def _budget_s(request: Request, elapsed_s: float, sizes: int) -> float:
    """The seconds of one of the `sizes` that are left; the same on every rank, like `elapsed_s`."""
    return min(BUDGET_S[request.grid], (TOTAL_S[request.grid] - elapsed_s) / sizes)


def _samples(job: _Job, clock: Clock, budget_s: float) -> list[float]:
    call = _Call.of(job)
    samples = sample(clock, call, budget_s)
    call.check()
    return samples


def _least_s(clock: Clock, reference: Callable[[], Any]) -> float:
    return min(clock.time(reference) for _ in range(REFERENCE_CALLS))


def _reference(world: World) -> Callable[[], Any]:
    """A product of two small matrices, warmed up."""
    import torch

    side = torch.ones(REFERENCE_SIDE, REFERENCE_SIDE, device=world.device)
    product = torch.empty_like(side)
    torch.mm(side, side, out=product)
    return lambda: torch.mm(side, side, out=product)


def _from_rank_0(done: frozenset[Place]) -> frozenset[Place]:
    """The places that rank 0 has, on every rank: the others of a launched world cannot read its file."""
    import torch.distributed as dist

    places = [[dataclasses.astuple(place) for place in done]]
    dist.broadcast_object_list(places, src=0)
    return frozenset(Place(*place) for place in places[0])
