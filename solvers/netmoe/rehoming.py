"""The homes that a policy gives the samples of one step after one layer: what plans are judged by and runs carry out.

Legend: I samples of a step; D devices.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ..arrays import Floats, Ints
from ..assignment import Method as Assignment
from ..compiled import seconds_to_compile
from ..outcome import Outcome
from .strategy import NetMoeResult, solve

Goal = Literal["sum", "bottleneck"]


@dataclass(frozen=True, slots=True)
class Way:
    """Way in which the homes after a layer are solved for."""

    #: goal, assignment: the objective and the method of `netmoe.solve`
    goal: Goal = "sum"
    assignment: Assignment = "transport"
    #: Whether samples are dealt in rounds, the longest first, one a device in each: devices then take about equal
    #: tokens, not only equal numbers of samples
    even: bool = False


METHODS = {
    "sum": Way(),
    "even": Way(even=True),
    "bottleneck": Way(goal="bottleneck"),
    "paper": Way(assignment="km"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Rehomed:
    """New homes, int64 `[I]`, the outcomes of the rounds that gave them, and of the whole step what bounds it."""

    device_of_sample: Ints
    dealt: tuple[Outcome, ...]
    whole: Outcome | None


def rehome(
    method: str,
    copies_ID: NDArray[np.integer],
    pairs_I: NDArray[np.integer],
    cluster: Cluster,
    *,
    next_copies: Floats | None = None,
    copy_bytes: float | None = None,
    bounded: bool = True,
) -> Rehomed:
    """The homes of a step's samples after a layer; equal on all ranks that give equal arguments.

    Parameters
    ----------
    method
        In `METHODS`.
    copies_ID, pairs_I
        The copies of each sample to every device in this layer, and its token-expert pairs, its length here.
    next_copies
        Copies of the next layer, as predicted, `[I, D]`; None: not looked at.
    copy_bytes
        Of a hidden vector; None where it is not known.
    bounded
        Whether to bound the outcome, too.

    Notes
    -----
    Devices take the same number of samples each, rounded up. What is bounded is the whole step, however it is dealt.
    """
    way, every_D = METHODS[method], np.arange(cluster.num_devices)

    def solved(at: Ints, *, bounded: bool) -> NetMoeResult:
        """The homes of some samples, among themselves."""
        return solve(
            copies_ID[at],
            every_D,
            cluster,
            next_counts=None if next_copies is None else next_copies[at],
            objective=way.goal,
            method=way.assignment,
            copy_bytes=copy_bytes,
            bounded=bounded,
        )

    device_I, dealt = np.zeros(len(copies_ID), np.int64), []
    for at in rounds(pairs_I, len(every_D)) if way.even else [np.arange(len(pairs_I))]:
        found = solved(at, bounded=bounded and not way.even)
        device_I[at] = found.device_of_sample
        dealt.append(found.outcome)
    whole = solved(np.arange(len(copies_ID)), bounded=True).outcome if bounded and way.even else None
    return Rehomed(device_I, tuple(dealt), whole)


def compile_rehoming(method: str, cluster: Cluster) -> float:
    """Compile what re-homes samples on such a cluster, or load it; the seconds that took, none without a compiler."""
    # Two sinks are a case of their own; more than three are three.
    small = cluster.at_most(3, 3)
    copies_ID = np.arange(4 * small.num_devices**2).reshape(-1, small.num_devices) % 7
    pairs_I, following_ID = copies_ID.sum(axis=1), copies_ID / 2
    return seconds_to_compile(
        lambda: rehome(method, copies_ID, pairs_I, small, next_copies=following_ID, copy_bytes=1.0)
    )


def rounds(pairs_I: NDArray[np.integer], size: int) -> list[Ints]:
    """Samples that "even" deals together, the longest first: one a device in each round."""
    longest = np.argsort(-pairs_I, kind="stable")
    return np.split(longest, range(size, len(longest), size))
