"""The measuring harness: warm-up, barriers, repeats and checks, the same for every case.

Each size is run once to warm up and its answer checked; then timed call by call, a barrier before each, first a few
times and then as often as fits into the time given; then checked again. A sample is the slowest rank's seconds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..errors import RankError
from .clock import Clock, clock_for
from .environment import Environment
from .measurement import Measurement, Size
from .world import World

__all__ = ["Case", "Request", "Start", "Step", "measure_cases"]

MIN_REPEATS, MAX_REPEATS = 5, 200
BUDGET_S, QUICK_BUDGET_S = 0.8, 0.25  # a size, beyond the minimal repeats


class Case(Protocol):
    """One thing to measure; picklable."""

    @property
    def name(self) -> str:
        """The key of the case in a profile."""

    @property
    def unit(self) -> Literal["bytes", "macs"]:
        """What `work` counts: bytes, or multiply-adds ("macs")."""

    @property
    def min_ranks(self) -> int:
        """The smallest world in which the case means something."""

    def dtypes(self, device: str) -> Sequence[str]:
        """The dtypes to measure it in on "cpu" or "cuda:i", most wanted first."""

    def sizes(self, world: World, *, quick: bool) -> Sequence[Size]:
        """The grid, small to large; the same on all ranks."""

    def work(self, size: Size, num_ranks: int) -> int:
        """Units of work of one rank in one call."""

    def prepare(self, size: Size, dtype: str, world: World) -> Any:
        """Inputs and output buffers of a rank, on its device; the buffers hold no right answer."""

    def run(self, inputs: Any) -> Any:
        """The call that is timed."""

    def check(self, inputs: Any, output: Any, world: World) -> str | None:
        """What is wrong with an output; None where it is right."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure."""

    cases: tuple[Case, ...]
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The first report of rank 0: where the ranks run."""

    environment: Environment
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A report of rank 0: one size measured, `done` of `total`."""

    case: str
    dtype: str
    measurement: Measurement
    done: int
    total: int


def measure_cases(world: World, request: Request) -> None:
    """Measure every case that suits this world; rank 0 reports a `Start` and then each `Step` as it comes.

    Raises
    ------
    RankError
        This rank got a wrong answer.
    """
    cases = [case for case in request.cases if world.size >= case.min_ranks]
    grid = [
        (case, dtype, size)
        for case in cases
        for dtype in case.dtypes(world.device)
        for size in case.sizes(world, quick=request.quick)
    ]
    clock = clock_for(world.device)
    if world.rank == 0:
        world.report(Start(Environment.of(world), world.hosts))
    for done, (case, dtype, size) in enumerate(grid, 1):
        samples = _samples(case, size, dtype, world, clock, QUICK_BUDGET_S if request.quick else BUDGET_S)
        if world.rank == 0:
            measurement = Measurement.of(size, case.work(size, world.size), samples)
            world.report(Step(case.name, dtype, measurement, done, len(grid)))


def _samples(case: Case, size: Size, dtype: str, world: World, clock: Clock, budget_s: float) -> list[float]:
    """Seconds of each timed call, the slowest rank's."""
    inputs = case.prepare(size, dtype, world)

    def call() -> Any:
        return case.run(inputs)

    _check(case, size, inputs, call(), world)
    start = time.perf_counter()
    samples = _timed(clock, call, MIN_REPEATS)
    (elapsed_s,) = _slowest([time.perf_counter() - start])
    repeats = min(MAX_REPEATS, int(budget_s / elapsed_s * MIN_REPEATS))
    samples += _timed(clock, call, repeats - MIN_REPEATS)
    _check(case, size, inputs, call(), world)
    return _slowest(samples)


def _timed(clock: Clock, call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call on this rank, after a barrier on the CPU wherever the ranks compute."""
    samples = []
    for _ in range(repeats):
        _slowest([0.0])
        samples.append(clock.time(call))
    return samples


def _slowest(seconds: list[float]) -> list[float]:
    """The largest over ranks of each number."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found


def _check(case: Case, size: Size, inputs: Any, output: Any, world: World) -> None:
    if wrong := case.check(inputs, output, world):
        at = ", ".join(f"{name} {value}" for name, value in size.items())
        raise RankError(f"{case.name} at {at} gave a wrong answer: {wrong}; its figures would mean nothing")
