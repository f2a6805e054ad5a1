"""The homes that a policy gives the samples of a cohort, step by step and layer by layer, as a run would.

Legend: I samples of a cohort; L MoE layers; E experts; D devices; B steps.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...solvers import netmoe
from .counted import SampleTraffic

__all__ = ["Homes", "Movers", "Predict", "Totals", "deal", "rehome", "steps_of"]

Predict = Callable[[int, NDArray[np.int64]], NDArray[np.float64] | None]  # layer, places in the roll -> [I, D]


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

    def add(self, found: netmoe.Rehomed) -> None:
        """Add the re-homing of a step after a layer."""
        for outcome in found.dealt:
            self.name = outcome.objective.name
            self.value += outcome.objective.value
        for outcome in (*found.dealt, *([found.whole] if found.whole else [])):
            self.bound += outcome.bound or 0.0
            self.wall_s += outcome.wall_s
        self.layers += 1


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
        In `solvers.netmoe.METHODS`.
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
    traffic, totals = movers.traffic, Totals()
    num_layers = traffic.copies.shape[1]
    device_LI = np.tile(movers.home, (num_layers + 1, 1))
    for at, layer in itertools.product(steps_of(movers.step), range(num_layers)):
        place = movers.place[at]
        found = netmoe.rehome(
            method,
            traffic.copies[place, layer],
            traffic.pairs[place, layer].sum(axis=1),
            cluster,
            next_copies=predict(layer, place),
            copy_bytes=copy_bytes,
            bounded=bounded,
        )
        device_LI[layer + 1 :, at] = found.device_of_sample
        totals.add(found)
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
