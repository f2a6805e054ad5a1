"""The simple bound on a goal, of devices and of nodes: no placement keeps more.

Legend: S slots of a device or a node.
"""

import numpy as np

from ..bounds import KeptBound, kept_bound
from .budget import Budget
from .methods import separable
from .problem import Problem

__all__ = ["bound_simply"]

BOUND_SHARE = 0.25  # of the time, at most


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
