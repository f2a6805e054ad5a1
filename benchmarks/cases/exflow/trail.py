"""A search as it went: what it kept, CPU second by CPU second."""

import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.profilers.cluster import Cluster
from moeplan.solvers import exflow
from moeplan.solvers.exflow.budget import Budget
from moeplan.solvers.exflow.methods import Method
from moeplan.solvers.exflow.programme import Programme
from moeplan.solvers.exflow.strategy import ANNEALING_RATE
from moeplan.solvers.exflow.sweeps import chain
from moeplan.solvers.outcome import Status
from moeplan.solvers.placement import Placement

from ...exflow_reference import NO_LIMIT_S
from ...race import peak_bytes
from ...study import Row

Array = np.ndarray
LITTLE_WORK = 2e8  # enough to see what sweeps hold


@dataclass(frozen=True, slots=True)
class Trail:
    """What one search kept of its transitions, and when.

    Parameters
    ----------
    steps
        CPU seconds of all threads and the share kept, of every better layout and at the end, ascending.
    bound
        A share that no placement exceeds.
    """

    placement: Placement
    steps: tuple[tuple[float, float], ...]
    bound: float

    @property
    def seconds(self) -> float:
        """CPU seconds in all."""
        return self.steps[-1][0]

    @property
    def kept(self) -> float:
        """The share that is kept in the end."""
        return self.steps[-1][1]

    def until(self, share: float) -> float | None:
        """CPU seconds until `share` was kept, None if it never was."""
        return next((seconds for seconds, kept in self.steps if kept >= share), None)

    def row(self, instance: str, method: str, *, baseline_s: float, seconds: float | None = None, **known: Any) -> Row:
        """A row of a study, after `seconds` of the search; by default after all of them."""
        own_s = self.seconds if seconds is None else seconds
        known |= {"bound": self.bound, "seconds": own_s, "least_s": own_s, "ratio": baseline_s / own_s}
        return Row(instance, method, **known)


def annealed(weights: Array, num_devices: int, budget_s: float, seed: int = 0) -> Trail:
    """Annealing with the work that `budget_s` seconds of time limit are."""
    return _searched(weights, num_devices, "annealing", seed, budget_s * ANNEALING_RATE)


def swept(weights: Array, num_devices: int, seed: int = 0, work: float | None = None) -> Trail:
    """Sweeps, until their budget of work is spent; by default their own."""
    return _searched(weights, num_devices, "sweeps", seed, work)


def held_bytes(weights: Array, num_devices: int, budget_s: float) -> dict[str, int]:
    """The peak memory of sweeps, which their budget does not change, and of annealing with a budget."""
    return {
        "sweeps": peak_bytes(lambda: swept(weights, num_devices, work=LITTLE_WORK)),
        "annealing": peak_bytes(lambda: annealed(weights, num_devices, budget_s)),
    }


def chained(weights: Array, num_devices: int, seed: int = 0) -> Array:
    """The chain of assignments alone: which experts of consecutive layers share a device, bool `[L-1, E, E]`."""
    sizes, slots = (weights.shape[1],) * (len(weights) + 1), np.full(num_devices, weights.shape[1] // num_devices)
    programme = Programme(list(weights), sizes, slots, np.eye(num_devices), num_devices)
    layout = chain(programme, 0, Budget(0, NO_LIMIT_S), np.random.default_rng(seed))
    return np.array([here[:, None] == there for here, there in itertools.pairwise(layout)])


def _searched(weights: Array, num_devices: int, method: Method, seed: int, work: float | None) -> Trail:
    some = np.random.default_rng(0).random((1, 8, 8))
    exflow.solve(some, Cluster(1, 2), method=method, work=1.0)  # loads and compiles what the next one needs
    steps: list[tuple[float, float]] = []
    started = time.process_time()
    found = exflow.solve(
        weights,
        Cluster(1, num_devices),
        method=method,
        time_limit_s=NO_LIMIT_S,
        work=work,
        seed=seed,
        on_progress=lambda kept: steps.append((time.process_time() - started, kept)),
    )
    if found.outcome.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    assert found.outcome.bound is not None
    end = (time.process_time() - started, found.outcome.objective.value)
    return Trail(found.placement, (*steps, end), found.outcome.bound)
