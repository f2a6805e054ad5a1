"""The homes that a policy gives the samples of a cohort, step by step and layer by layer, as a run would.

Legend: I samples of a cohort; L MoE layers; E experts; D devices; B steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...solvers import netmoe
from ...solvers.assignment import Method as Assignment
from ...solvers.outcome import Outcome
from .counted import Traffic

__all__ = ["METHODS", "Homes", "Objective", "Predict", "Totals", "Way", "rehome", "steps_of"]

Objective = Literal["sum", "bottleneck"]
Predict = Callable[[int, NDArray[np.int64]], NDArray[np.float64] | None]  # layer, places in the roll -> [I, D]


@dataclass(frozen=True, slots=True)
class Way:
    """How the homes after a layer are solved for.

    Parameters
    ----------
    objective, assignment
        As `solvers.netmoe.solve` takes them.
    even
        Whether samples are dealt in rounds, the longest first, one a device in each: devices then take about equal
        tokens, not only equal numbers of samples.
    """

    objective: Objective = "sum"
    assignment: Assignment = "transport"
    even: bool = False


METHODS = {
    "sum": Way(),
    "even": Way(even=True),
    "bottleneck": Way(objective="bottleneck"),
    "paper": Way(assignment="km"),
}


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
    method: str,
    traffic: Traffic,
    place: NDArray[np.int64],
    home: NDArray[np.int64],
    step: NDArray[np.int64],
    cluster: Cluster,
    *,
    predict: Predict,
    copy_bytes: float | None,
    assignment: Assignment | None = None,
    bounded: bool = True,
) -> Homes:
    """New homes after every layer; those of an incomplete last step stay.

    Parameters
    ----------
    method
        In `METHODS`.
    place, home, step
        Of each sample: its row in the traffic, where it starts, its step or -1, `[I]`.
    predict
        The next layer's copies, None where they are not looked at.
    copy_bytes
        Of a hidden vector; None where it is not known.
    assignment
        Instead of the method's own; all give the same homes.
    bounded
        Whether to bound the totals, too.

    Notes
    -----
    A step's devices take the same number of samples each, rounded up. Where samples are dealt in rounds, their length
    is that of this layer: the pairs they have in it.
    """
    way, num_layers = METHODS[method], traffic.copies.shape[1]
    device_LI = np.tile(home, (num_layers + 1, 1))
    totals, here_D = Totals(), np.arange(cluster.num_devices)
    for at in steps_of(step):
        for layer in range(num_layers):
            for dealt in _rounds(at, traffic.pairs[place[at], layer], way):
                found = netmoe.solve(
                    traffic.copies[place[dealt], layer],
                    here_D,
                    cluster,
                    next_counts=predict(layer, place[dealt]),
                    objective=way.objective,
                    method=assignment or way.assignment,
                    copy_bytes=copy_bytes if way.objective == "bottleneck" else None,
                    bounded=bounded,
                )
                device_LI[layer + 1 :, dealt] = found.device_of_sample
                totals.add(found.outcome)
            totals.layers += 1
    return Homes(device_LI, totals)


def steps_of(step: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The samples of each step."""
    order = np.argsort(step, kind="stable")
    order = order[np.searchsorted(step[order], 0) :]
    return np.split(order, np.flatnonzero(np.diff(step[order])) + 1) if len(order) else []


def _rounds(at: NDArray[np.int64], pairs_ID: NDArray[np.int32], way: Way) -> list[NDArray[np.int64]]:
    """The samples that are dealt together, all or D at a time."""
    if not way.even:
        return [at]
    longest = at[np.argsort(-pairs_ID.sum(axis=1), kind="stable")]
    return np.split(longest, range(pairs_ID.shape[1], len(at), pairs_ID.shape[1]))
