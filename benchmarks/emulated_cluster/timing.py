"""Seconds of steps that all ranks make together: in turn, so that what the machine does meanwhile meets all alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moeplan.profilers.measurement import median_interval

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Samples of one call, each the slowest rank's, in the order taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Their median."""
        return float(np.median(self.samples))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the median."""
        return median_interval(self.samples)


def interleaved(calls: Mapping[str, Call], rounds: int) -> dict[str, Seconds]:
    """The seconds of each call, all once a round, after one that is not timed; the same on every rank."""
    for call in calls.values():
        call()
    taken = torch.tensor([[_once(call) for call in calls.values()] for _ in range(rounds)], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return {name: Seconds(tuple(column)) for name, column in zip(calls, taken.T.tolist(), strict=True)}


def ratio(before: Seconds, after: Seconds) -> tuple[float, float, float]:
    """How many times as fast: the median of the rounds' ratios, and its 95 % interval."""
    ratios = [old / new for old, new in zip(before.samples, after.samples, strict=True)]
    return float(np.median(ratios)), *median_interval(ratios)


def _once(call: Call) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
