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
from .counted import Traffic

__all__ = ["METHODS", "Homes", "Objective", "Predict", "Totals", "rehome", "steps_of"]

Objective = Literal["sum", "bottleneck"]
Predict = Callable[[int, NDArray[np.int64]], NDArray[np.float64] | None]  # layer, places in the roll -> [I, D]
METHODS: dict[str, tuple[Objective, Assignment]] = {
    "sum": ("sum", "transport"),
    "bottleneck": ("bottleneck", "transport"),
    "paper": ("sum", "km"),
}


@dataclass(slots=True)
class Totals:
    """Sums over all solves: what was reached, by name, what bounds it, and its seconds."""

    name: str = ""
    value: float = 0.0
    bound: float = 0.0
    solves: int = 0
    wall_s: float = 0.0


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

    Notes
    -----
    A step's devices take the same number of samples each, rounded up.
    """
    objective, usual = METHODS[method]
    num_layers = traffic.copies.shape[1]
    device_LI = np.tile(home, (num_layers + 1, 1))
    totals, here_D = Totals(), np.arange(cluster.num_devices)
    for at in steps_of(step):
        for layer in range(num_layers):
            found = netmoe.solve(
                traffic.copies[place[at], layer],
                here_D,
                cluster,
                next_counts=predict(layer, place[at]),
                objective=objective,
                method=assignment or usual,
                copy_bytes=copy_bytes if objective == "bottleneck" else None,
            )
            device_LI[layer + 1 :, at] = found.device_of_sample
            outcome = found.outcome
            totals.name = outcome.objective.name
            totals.value += outcome.objective.value
            totals.bound += outcome.bound or 0.0
            totals.solves += 1
            totals.wall_s += outcome.wall_s
    return Homes(device_LI, totals)


def steps_of(step: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The samples of each step."""
    order = np.argsort(step, kind="stable")
    order = order[np.searchsorted(step[order], 0) :]
    return np.split(order, np.flatnonzero(np.diff(step[order])) + 1) if len(order) else []
