"""The bounds on a goal, of devices and of nodes: simple ones before a search, thorough ones after it, with their proof.

Legend: L MoE layers; E experts per layer; D devices, S slots of each; N nodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Floats, Ints
from ..bounds import KeptBound, ThoroughBound, kept_bound, thorough_bound
from ..cost import hops_kept
from ..placement import Placement
from .budget import Budget
from .methods import separable
from .problem import Level, Problem

BOUND_SHARE = 0.25  # of the time, at most
LATE_S = 0.5  # for what is left at Ctrl-C


def bound_simply(problem: Problem, budget: Budget) -> tuple[KeptBound, bool]:
    """The simple bound on the goal and whether Ctrl-C cut it short, which leaves a loose one.

    Parameters
    ----------
    budget
        Of the solve, of which it may take a share; what it leaves goes back.
    """
    part, programme = budget.part(BOUND_SHARE), problem.programme
    is_proof = separable(programme, problem.terms) and not programme.has_spare_slots  # the chain's own
    try:
        return _bound(problem, 0.0 if is_proof else part.remaining_s), False
    except KeyboardInterrupt:
        return _bound(problem, 0.0), True
    finally:
        budget.settle(part)


def _bound(problem: Problem, time_limit_s: float) -> KeptBound:
    """The simple bound on the goal; a loose one where there is no time, as where the chain proves its own."""
    weights, beside = problem.weights, problem.terms.beside
    if beside is not None:  # both ends of a pair see it
        weights = np.concatenate([weights, beside / 2])
    levels = problem.goal.levels(problem.programme.slots)
    part_s = time_limit_s / len(levels)
    return problem.goal.bound(
        {level: kept_bound(weights, slots, time_limit_s=part_s) for level, slots in levels.items()}
    )


@dataclass(frozen=True, slots=True)
class Thorough:
    """A bound on the goal and how it came about."""

    bound: KeptBound
    #: By level, "device" and "node", the prices and floors `[L, E, E+4]` that prove it (`bounds.ThoroughBound`)
    proofs: Mapping[str, Floats] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)  #: By level, why the simple bound stands there
    interrupted: bool = False  #: Whether Ctrl-C ended it


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

    def bounded(level: Level, slots: Ints) -> KeptBound:
        """Bound of one level within its share of the time; a quick one after Ctrl-C."""
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
