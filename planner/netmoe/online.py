"""The homes that a policy gives the samples of a cohort, step by step and layer by layer, as a run would.

Legend: I samples of a cohort; L MoE layers; E experts; D devices; B steps.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...solvers import netmoe
from ...solvers.assignment import Method as Assignment
from ...solvers.outcome import Outcome
from .counted import SampleTraffic

__all__ = ["METHODS", "Goal", "Homes", "Movers", "Predict", "Totals", "Way", "deal", "rehome", "steps_of"]

Goal = Literal["sum", "bottleneck"]
Predict = Callable[[int, NDArray[np.int64]], NDArray[np.float64] | None]  # layer, places in the roll -> [I, D]


@dataclass(frozen=True, slots=True)
class Way:
    """How the homes after a layer are solved for.

    Parameters
    ----------
    goal, assignment
        The objective and the method of `solvers.netmoe.solve`.
    even
        Whether samples are dealt in rounds, the longest first, one a device in each: devices then take about equal
        tokens, not only equal numbers of samples.
    """

    goal: Goal = "sum"
    assignment: Assignment = "transport"
    even: bool = False


METHODS = {
    "sum": Way(),
    "even": Way(even=True),
    "bottleneck": Way(goal="bottleneck"),
    "paper": Way(assignment="km"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Movers:
    """Samples that move under one placement.

    Parameters
    ----------
    place, home, step
        Of each: its row in the traffic, where it starts, its step or -1, `[I]`.
    """

    traffic: SampleTraffic
    place: NDArray[np.int64]
    home: NDArray[np.int64]
    step: NDArray[np.int64]


@dataclass(slots=True)
class Totals:
    """Sums over the re-homings, one a step and layer: what was reached, by name, what bounds it, and its seconds."""

    name: str = ""
    value: float = 0.0
    bound: float = 0.0
    layers: int = 0
    wall_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Add a solve."""
        self.name = outcome.objective.name
        self.value += outcome.objective.value
        self.add_bound(outcome)

    def add_bound(self, outcome: Outcome) -> None:
        """Add what bounds a solve, and its seconds."""
        self.bound += outcome.bound or 0.0
        self.wall_s += outcome.wall_s


@dataclass(frozen=True, slots=True, eq=False)
class Homes:
    """Where samples are when each layer begins and after the last, int64 `[L+1, I]`, and how that came about."""

    device: NDArray[np.int64]
    totals: Totals

    def moved(self, step: NDArray[np.int64], num_steps: int) -> NDArray[np.float64]:
        """The share of samples that change their device in a combine, mean over layers, by step `[B]`."""
        moved_I = (self.device[1:] != self.device[:-1]).mean(axis=0)
        counted = step >= 0
        moved_B = np.bincount(step[counted], moved_I[counted], num_steps)
        return np.asarray(moved_B / np.maximum(np.bincount(step[counted], minlength=num_steps), 1))


def rehome(
    method: str, movers: Movers, cluster: Cluster, *, predict: Predict, copy_bytes: float | None, bounded: bool = True
) -> Homes:
    """New homes after every layer; those of an incomplete last step stay.

    Parameters
    ----------
    method
        In `METHODS`.
    predict
        The next layer's copies, None where they are not looked at.
    copy_bytes
        Of a hidden vector; None where it is not known.
    bounded
        Whether to bound the totals, too.

    Notes
    -----
    A step's devices take the same number of samples each, rounded up. Where samples are dealt in rounds, their length
    is that of this layer: the pairs they have in it. What is bounded is the whole step, however it is dealt.
    """
    way, traffic = METHODS[method], movers.traffic
    num_layers, totals = traffic.copies.shape[1], Totals()
    device_LI = np.tile(movers.home, (num_layers + 1, 1))

    def solved(layer: int, place: NDArray[np.int64], *, bounded: bool) -> netmoe.NetMoeResult:
        return netmoe.solve(
            traffic.copies[place, layer],
            np.arange(cluster.num_devices),
            cluster,
            next_counts=predict(layer, place),
            objective=way.goal,
            method=way.assignment,
            copy_bytes=copy_bytes,
            bounded=bounded,
        )

    for at, layer in itertools.product(steps_of(movers.step), range(num_layers)):
        place = movers.place[at]
        for dealt in _rounds(traffic.pairs[place, layer], way):
            found = solved(layer, place[dealt], bounded=bounded and not way.even)
            device_LI[layer + 1 :, at[dealt]] = found.device_of_sample
            totals.add(found.outcome)
        if bounded and way.even:
            totals.add_bound(solved(layer, place, bounded=True).outcome)
        totals.layers += 1
    return Homes(device_LI, totals)


def deal(length: NDArray[np.int64], home: NDArray[np.int64], step: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Homes `[I]` as a data loader deals by length alone: the longest first, each to the device with the fewest tokens.

    A step's devices take the same number of samples each, rounded up; those of an incomplete last step stay.
    """
    device_I = home.copy()
    for at in steps_of(step):
        tokens_D, room_D = np.zeros(size), np.full(size, -(-len(at) // size))
        for one in at[np.argsort(-length[at], kind="stable")]:
            device = np.where(room_D > 0, tokens_D, np.inf).argmin()
            device_I[one] = device
            tokens_D[device] += length[one]
            room_D[device] -= 1
    return device_I


def steps_of(step: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The samples of each step."""
    order = np.argsort(step, kind="stable")
    order = order[np.searchsorted(step[order], 0) :]
    return np.split(order, np.flatnonzero(np.diff(step[order])) + 1) if len(order) else []


def _rounds(pairs_ID: NDArray[np.int32], way: Way) -> list[NDArray[np.int64]]:
    """Which of the samples are dealt together: all, or D at a time."""
    if not way.even:
        return [np.arange(len(pairs_ID))]
    longest = np.argsort(-pairs_ID.sum(axis=1), kind="stable")
    return np.split(longest, range(pairs_ID.shape[1], len(longest), pairs_ID.shape[1]))
