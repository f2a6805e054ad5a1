"""What the fitted tokens of a plan show, counted again: the naive twin of `traces.counts`.

Legend: L MoE layers; E experts.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...runtime.plan import Plan
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from .count_recount import steps_of, total_of
from .roster import Roster, tokens_of
from .structure import evaluation_options, keeps_pairs

__all__ = ["Fitted", "count_fitted"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the fitted tokens show: loads `[L, E]` over all choices, and what the placement is to keep together.

    Parameters
    ----------
    between
        Transitions from first choices `[L-1, E, E]`: to first choices; to save copies, to all, or to none where tokens
        return home.
    within
        How often a token has two experts of a layer, either first, `[L, E, E]`; None where hops alone count.
    steps
        The loads step by step `[B, L, E]` where a placement was balanced over recorded ones; None elsewhere.
    """

    loads: NDArray[np.int64]
    between: NDArray[np.int64]
    within: NDArray[np.int64] | None
    steps: NDArray[np.int64] | None = None


def count_fitted(plan: Plan, trace: Trace | CountTrace, roster: Roster) -> Fitted:
    """The counts of the fitted units."""
    num_layers, num_experts = plan.model.num_layers, plan.model.num_experts
    by_step = "placement" in plan.outcome and plan.outcome["placement"].objective.name.startswith("step_balance")
    if isinstance(trace, CountTrace):
        nothing = np.zeros((num_layers - 1, num_experts, num_experts), np.int64)
        return Fitted(total_of(trace, roster), nothing, None, steps_of(trace, roster) if by_step else None)
    steps = np.zeros((roster.num_steps, num_layers, num_experts), np.int64) if by_step else None
    loads = np.zeros((num_layers, num_experts), np.int64)
    between = np.zeros((num_layers - 1, num_experts, num_experts), np.int64)
    paired = "placement" in plan.outcome and keeps_pairs(plan)
    within = np.zeros((num_layers, num_experts, num_experts), np.int64) if paired else None
    followed = 1 if not paired else 0 if plan.dispatch_model == "standard" else plan.model.top_k
    for tokens in tokens_of(trace, roster, evaluation_options(plan).phases):
        for layer in range(num_layers):
            ids = tokens.ids[:, layer]
            np.add.at(loads[layer], ids[ids < num_experts], 1)
            if steps is not None:
                at, choice_at = np.nonzero(ids < num_experts)
                np.add.at(steps[:, layer], (tokens.step[at], ids[at, choice_at]), 1)
            for choice in range(followed if layer else 0):
                _add_pairs(between[layer - 1], tokens.ids[:, layer - 1, 0], ids[:, choice])
            if within is not None:
                for one, other in itertools.permutations(ids.T, 2):
                    apart = one != other  # an expert named twice is no pair
                    _add_pairs(within[layer], one[apart], other[apart])
    return Fitted(loads, between, within, steps)


def _add_pairs(table: NDArray[np.int64], one: NDArray[np.uint16], other: NDArray[np.uint16]) -> None:
    """Add the pairs of two choices of every token, both routed, `[E, E]`."""
    routed = (one < len(table)) & (other < len(table))
    np.add.at(table, (one[routed], other[routed]), 1)
