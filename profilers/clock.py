"""Clocks: the seconds a call takes on a device."""

import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Clock", "clock_for"]

FLUSH_BYTES = 256 * 2**20  # more than the L2 cache of any GPU


class Clock(Protocol):
    """Times one call."""

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds from the call's start to its end on the device."""


def clock_for(device: str) -> Clock:
    """The clock of "cpu" or "cuda:i"."""
    return _CpuClock() if device == "cpu" else _CudaClock(device)


class _CpuClock:
    """Wall-clock seconds."""

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

    def time(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, with the L2 cache flushed before it."""
        self._scratch.zero_()  # also keeps the GPU busy while the launches below queue, so that they are not timed
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3
