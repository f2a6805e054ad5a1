"""Re-planning: the placement that is worth most when every expert that moves has its price.

Legend: L MoE layers; E experts a layer; D devices.
"""

import dataclasses
import time

import numpy as np
from numpy.typing import ArrayLike

from ...errors import UsageError
from ...profilers.cluster import Cluster
from ..assignment import assign_places
from ..checked_counts import checked_counts
from ..cost import hops_kept
from ..moves import keep_in_place
from ..outcome import ROUNDING, Outcome, Status, relative_gap
from ..placement import Placement
from ..result import PlacementResult
from .goal import Goal
from .programme import Layout, Programme
from .sweeps import gains

__all__ = ["reconsider"]


def reconsider(
    transitions: ArrayLike,
    cluster: Cluster,
    found: PlacementResult,
    old: Placement,
    *,
    price: float = 0.0,
    time_limit_s: float = 30.0,
) -> PlacementResult:
    """The placement to go to from `old`: the one found, its devices renamed, or one between the two.

    Parameters
    ----------
    transitions
        W `[L-1, E, E]`, those that `found` was found for.
    price
        What a move costs, in transitions that stay on one node (`Goal`'s value). At 0 only devices are renamed, which
        loses nothing.
    time_limit_s
        A cap on the seconds that weighing moves takes.

    Raises
    ------
    UsageError
        A price where experts have replicas, or where no hops were optimised.

    Notes
    -----
    With moved(x) the experts that are elsewhere than in `old`,

        max value(x) - price moved(x)                                                                           (1)

    by sweeps from `old` and from `found`, of which the better is taken: one layer given its neighbours is a
    transportation problem, with `price` on staying, solved exactly. So (1) is at least what both have.
    """
    started = time.perf_counter()
    renamed = keep_in_place(found.placement, old, cluster.devices_per_node)
    if not price:
        return dataclasses.replace(found, placement=renamed)
    alike = renamed.slots.tolist() == old.slots.tolist() and not old.has_replicas
    if not alike or found.outcome.objective.name not in ("hops_kept", "hop_cost"):
        raise UsageError(
            f"moves to be weighed against {found.outcome.objective.name}, in {old.num_slots} slots now and"
            f" {renamed.num_slots} then; expected hops, and one slot an expert as before: leave --horizon away, devices"
            " are still named so that few experts move"
        )
    num_experts = old.num_experts
    weights_LEE = checked_counts(transitions, "transitions", (old.num_layers - 1, num_experts, num_experts))
    goal = Goal(cluster, float(weights_LEE.sum()), expected=False)
    programme = Programme(
        list(weights_LEE), (num_experts,) * old.num_layers, old.slots, goal.near, cluster.devices_per_node
    )
    before, deadline = _layout(old), started + time_limit_s
    reached = [_settled(programme, start, before, price, deadline) for start in (before, _layout(renamed))]
    layout = max(reached, key=lambda one: _net(programme, one, before, price))
    sets = [[np.flatnonzero(home_E == d).tolist() for d in range(len(old.slots))] for home_E in layout]
    placement = Placement.from_sets(sets, num_experts)
    value = goal.value(hops_kept(weights_LEE, placement, cluster.devices_per_node))
    return dataclasses.replace(found, placement=placement, outcome=_outcome(found, goal, value, started))


def _outcome(found: PlacementResult, goal: Goal, value: float, started: float) -> Outcome:
    """The outcome of what was found, at another value."""
    outcome, objective = found.outcome, goal.objective(value)
    gap = relative_gap(objective.value, outcome.bound)
    optimal = outcome.status is Status.OPTIMAL and gap is not None and gap <= ROUNDING
    status = outcome.status if optimal or outcome.status is not Status.OPTIMAL else Status.FEASIBLE
    wall_s = outcome.wall_s + time.perf_counter() - started
    return dataclasses.replace(outcome, status=status, objective=objective, gap=gap, wall_s=wall_s)


def _layout(placement: Placement) -> Layout:
    return [placement.holds(layer).argmax(axis=1) for layer in range(placement.num_layers)]


def _settled(programme: Programme, start: Layout, before: Layout, price: float, deadline: float) -> Layout:
    """Sweeps from `start`, up and down, until no layer gains or time runs out."""
    layout, upward, gained = list(start), True, True
    layers = range(programme.num_layers)
    while gained and time.perf_counter() < deadline:
        gained = False
        for layer in layers if upward else reversed(layers):
            row_E, worth_ED = np.arange(programme.sizes[layer]), programme.worth(layout, layer)
            worth_ED[row_E, before[layer]] += price
            home_E = assign_places(-worth_ED, programme.places)
            if gains(worth_ED, home_E, layout[layer]):
                layout[layer], gained = home_E, True
        upward = not upward
    return layout


def _net(programme: Programme, layout: Layout, before: Layout, price: float) -> float:
    moved = sum(np.count_nonzero(now_E != was_E) for now_E, was_E in zip(layout, before, strict=True))
    return programme.value(layout) - price * moved  # (1)
