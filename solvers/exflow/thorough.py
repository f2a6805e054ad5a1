"""The thorough bound on a goal, of devices and of nodes, with what proves it.

Legend: L MoE layers; E experts a layer; D devices, S slots of each; N nodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..bounds import KeptBound, ThoroughBound, kept_bound, thorough_bound
from ..cost import hops_kept
from ..placement import Placement
from .goal import Level
from .problem import Problem

__all__ = ["Thorough", "bound_thoroughly"]

LATE_S = 0.5  # for what is left at Ctrl-C


@dataclass(frozen=True, slots=True)
class Thorough:
    """A bound on the goal and how it came about.

    Parameters
    ----------
    proofs
        By level, "device" and "node", the prices and floors `[L, E, E+4]` that prove it (`bounds.ThoroughBound`).
    reasons
        By level, why the simple bound stands there.
    interrupted
        Whether Ctrl-C ended it.
    """

    bound: KeptBound
    proofs: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    interrupted: bool = False


def bound_thoroughly(
    problem: Problem,
    placement: Placement,
    known: KeptBound,
    time_limit_s: float,
    report: Callable[[float], None] | None,
) -> Thorough:
    """The better of a known bound and the thorough one, guided by what a placement keeps, also after Ctrl-C."""
    kept = hops_kept(problem.weights, placement, problem.goal.cluster.devices_per_node)
    total, found = problem.goal.total, dict[str, ThoroughBound]()
    say = None if report is None else lambda value: report(value / total)

    levels = problem.goal.levels(problem.programme.slots)
    part_s = time_limit_s / len(levels)

    def bounded(level: Level, slots: NDArray[np.int64]) -> KeptBound:
        if any(one.interrupted for one in found.values()):
            return kept_bound(problem.weights, slots, time_limit_s=LATE_S)
        near = float((kept.device if level == "device" else kept.node).sum())
        found[level] = thorough_bound(problem.weights, slots, kept=near, time_limit_s=part_s, on_progress=say)
        return found[level]

    try:
        bound = problem.goal.bound({level: bounded(level, slots) for level, slots in levels.items()})
    except KeyboardInterrupt:
        return Thorough(known, interrupted=True)
    interrupted = any(one.interrupted for one in found.values())
    reasons = {level: one.reason for level, one in found.items() if one.reason}
    if known.value <= bound.value:
        return Thorough(known, reasons=reasons, interrupted=interrupted)
    proofs = {level: one.proof for level, one in found.items() if one.proof is not None}
    return Thorough(bound, proofs, reasons, interrupted)
