"""Sampling: a call timed on a device until the median of its seconds is known well, or its time is spent.

Every decision is taken on figures that all ranks have alike, so that no rank repeats a call that another does not.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .measurement import MIN_SAMPLES, relative_width

FLUSH_BYTES = 256 * 2**20  # more than the L2 cache of any GPU
CPU_FLUSH_BYTES = 16 * 2**20  # more than the L2 cache of a core, and than a rank's part of the L3 cache
NARROW = 0.05  # relative width of the median's 95 % interval
MAX_REPEATS = 200
FIRST_BUDGETS = 4  # budgets that the first 6 may take


class Clock(Protocol):
    """Times one call with cold caches: between two calls of its kind a model runs the rest of its layers."""

    def flush(self) -> None:
        """Overwrite the caches before the ranks meet; nothing where `time` does so on the device."""

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds from the call's start to its end on the device."""


def clock_for(device: str) -> Clock:
    """The clock of "cpu" or "cuda:i"."""
    return _CpuClock() if device == "cpu" else _CudaClock(device)


class _CpuClock:
    """Wall-clock seconds."""

    def __init__(self) -> None:
        self._scratch = np.empty(CPU_FLUSH_BYTES, np.uint8)

    def flush(self) -> None:
        """Write more than the caches hold; ranks that start a collective one after another would wait in it."""
        self._scratch.fill(0)

    def time(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class _CudaClock:
    """Seconds between two events; the L2 cache is overwritten before the first."""

    def __init__(self, device: str) -> None:
        import torch

        self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Leave it to `time`."""

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, with the L2 cache flushed before it."""
        self._scratch.zero_()  # also keeps the GPU busy while the launches below queue, so that they are not timed
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3


def sample(clock: Clock, call: Callable[[], Any], budget_s: float) -> list[float]:
    """Seconds of each timed call, the slowest rank's, with a barrier on the CPU before each.

    Parameters
    ----------
    budget_s
        Time beyond which no further call is begun, once there are 6; 6 may take four times as long, and of calls too
        slow for that there are fewer, at least one.

    Notes
    -----
    One call, then five, then as many as all before, and so on. After a batch the sampling ends when the 95 % interval
    of the median is at most 5 % wide. Looking several times at an interval makes it hold a little less often than it
    says.
    """
    start = time.perf_counter()
    samples: list[float] = []
    more = 1
    while more > 0:
        *batch, elapsed_s = slowest([*timed(clock, call, more), time.perf_counter() - start])
        samples += batch
        more = 0 if relative_width(samples) <= NARROW else _more(len(samples), elapsed_s, budget_s)
    return samples


def slowest(seconds: Sequence[float]) -> list[float]:
    """The largest over all ranks of each number; also a barrier."""
    import torch
    import torch.distributed as dist

    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    slowest_s: list[float] = largest.tolist()
    return slowest_s


def timed(clock: Clock, call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call on this rank."""
    samples = []
    for _ in range(repeats):
        clock.flush()
        slowest([0.0])
        samples.append(clock.time(call))
    return samples


def _more(num_samples: int, elapsed_s: float, budget_s: float) -> int:
    """Number of calls still to make, given the time that those made took."""
    if num_samples < MIN_SAMPLES and elapsed_s * MIN_SAMPLES <= FIRST_BUDGETS * budget_s * num_samples:
        return MIN_SAMPLES - num_samples
    within = int((budget_s / elapsed_s - 1) * num_samples)
    return min(max(num_samples, MIN_SAMPLES - num_samples), MAX_REPEATS - num_samples, within)
