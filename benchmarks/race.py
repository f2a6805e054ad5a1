"""The one way in which benchmarks take time and memory."""

import gc
import itertools
import math
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BURST_S = 0.002  # shorter calls are repeated back to back for so long
COLD_S = 0.1  # a first call below this is judged by a second
LEAST_ROUNDS, MOST_ROUNDS = 3, 25

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """What a call took.

    Parameters
    ----------
    seconds, least_s
        Median and least over the rounds, CPU time.
    ratio
        How many times as fast as the baseline, the median over the rounds.
    memory_bytes
        As `peak_bytes`; None where it was not asked for.
    value
        What the call returned when it was warmed up.
    """

    seconds: float
    least_s: float
    ratio: float | None
    memory_bytes: int | None
    value: Any

    @property
    def figures(self) -> dict[str, Any]:
        """All but the value, as a row takes them."""
        return {name: getattr(self, name) for name in ("seconds", "least_s", "ratio", "memory_bytes")}


def race(
    calls: Mapping[str, Call],
    baseline: str = "",
    *,
    budget_s: float = 0.5,
    rounds: int | None = None,
    memory: bool = True,
    clock: Callable[[], float] | None = None,
) -> dict[str, Timing]:
    """The timings of calls that run in turn, round after round, in this process, the garbage collector off.

    Parameters
    ----------
    baseline
        The call whose seconds in a round are divided by every call's in the same round.
    budget_s, rounds
        At least three rounds and about so long for all calls together, unless their number is given.
    clock
        `cpu_s` unless given.

    Notes
    -----
    Each call is first made untimed. In a round a short call runs in a burst and counts with its mean.
    """
    clock = clock or cpu_s
    values, bursts, round_s = {}, {}, 0.0
    for name, call in calls.items():
        values[name], once_s = _warmed_up(call, clock)
        bursts[name] = max(1, math.ceil(BURST_S / max(once_s, 1e-7)))
        round_s += max(once_s, BURST_S)
    turns = rounds or min(MOST_ROUNDS, max(LEAST_ROUNDS, int(budget_s / round_s)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _, (name, call) in itertools.product(range(turns), calls.items()):
            taken[name].append(_seconds(call, bursts[name], clock))
    finally:
        gc.enable()
    return {
        name: Timing(
            seconds=statistics.median(own),
            least_s=min(own),
            ratio=statistics.median(map(_divided, taken[baseline], own)) if baseline else None,
            memory_bytes=peak_bytes(calls[name]) if memory else None,
            value=values[name],
        )
        for name, own in taken.items()
    }


def cpu_s() -> float:
    """CPU seconds of this process and of children that ended: what others do on the machine is not in them."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_bytes(call: Call) -> int:
    """The most that one call holds at a time of what Python and NumPy allocate, what it returns included.

    Compiled libraries' own memory (OR-Tools' graphs, CBC's process, Arrow's buffers) is not seen.
    """
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _warmed_up(call: Call, clock: Callable[[], float]) -> tuple[Any, float]:
    """What a call returns, and the seconds of one that is warm."""
    started = clock()
    value = call()
    once_s = clock() - started
    return value, once_s if once_s >= COLD_S else min(once_s, _seconds(call, 1, clock))


def _divided(baseline_s: float, own_s: float) -> float:
    return baseline_s / max(own_s, 1e-12)


def _seconds(call: Call, times: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(times):
        call()
    return (clock() - started) / times
