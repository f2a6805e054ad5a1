"""Rechecks common to all strategies that place experts: options are its own, groups whole, the objective recomputed.

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections.abc import Iterator, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...runtime.plan import Plan
from ..options import PlacementOptions, parsed
from .strategy import Again, Check, Told

__all__ = ["balances", "check_goal", "check_groups", "placement_options", "rechecked_balance"]

Loads = NDArray[Any]


def placement_options(plan: Plan, name: str, own: tuple[str, ...]) -> PlacementOptions:
    """How the placement was decided, refused where a strategy has options that it does not take."""
    options = parsed(PlacementOptions, dict(plan.options.get("placement", {})), "placement")
    kept = {"strategy", "dispatch_model", "method", "backend", "time_limit_s", *own}
    asked = {key for key in options.model_fields_set if getattr(options, key) not in (None, (), "split")} - kept
    if options.strategy != name or asked:
        raise CertificationError(
            f"strategies {[*plan.strategies]} with options of {options.strategy!r}, {sorted(asked)} among them, flags"
            f" that {name} does not have"
        )
    return options


def check_goal(plan: Plan, names: tuple[str, ...], sense: str, kinds: Set[str]) -> None:
    """Refuse another objective than a strategy has, and a bound of kinds that it does not have."""
    outcome = plan.outcome["placement"]
    goal, kind = outcome.objective, outcome.bound_kind
    if goal.name not in names or goal.sense != sense:
        raise CertificationError(f"objective {goal.sense} {goal.name}; expected {sense} {' or '.join(names)}")
    if kind is not None and not {*kind.split(" and ")} <= kinds:
        raise CertificationError(f"bound of {kind}; expected of {', '.join(sorted(kinds))}")


def balances(plan: Plan, loads_BLE: Loads, rows: Loads | None = None) -> NDArray[np.float64]:
    """The busiest device over the mean of those with slots, by step and layer `[B, L]`, replicas sharing alike; 1 of
    nothing. `rows` are the expert in each slot, the plan's without.
    """
    placement = plan.placement
    assert placement is not None
    held = placement.physical_to_logical if rows is None else rows
    found_BL = np.ones(loads_BLE.shape[:2])
    for layer, expert_P in enumerate(held):
        share_P = 1 / np.bincount(expert_P, minlength=placement.num_experts)[expert_P]
        load_BP = loads_BLE[:, layer, expert_P] * share_P
        ends = np.cumsum(placement.slots)
        load_BD = np.stack([one.sum(axis=1) for one in np.split(load_BP, ends[:-1], axis=1)], axis=1)
        load_BD = load_BD[:, placement.slots > 0]
        routed = load_BD.any(axis=1)
        found_BL[routed, layer] = load_BD[routed].max(axis=1) / load_BD[routed].mean(axis=1)
    return found_BL


def rechecked_balance(plan: Plan, again: Again | None, name: str) -> Iterator[Check | Told]:
    """Recheck of experts in order: the objective is the balance of equal loads."""
    placement_options(plan, name, ())
    if "placement" not in plan.outcome:
        return
    check_goal(plan, ("balance",), "min", frozenset())
    if again is not None:
        equal = np.ones((1, plan.model.num_layers, plan.model.num_experts))
        yield Check("objective", plan.outcome["placement"].objective.value, float(balances(plan, equal).mean()))
        yield Told("objective", checked=True)


def check_groups(plan: Plan) -> None:
    """Refuse a placement that splits a group: each is in one block of slots of its own."""
    decision, groups = plan.decisions.placement, plan.model.num_expert_groups
    assert decision is not None
    if not groups or plan.model.num_experts % groups:
        raise CertificationError("whole expert groups of a model without such groups")
    size = plan.model.num_experts // groups
    for layer, row in enumerate(decision.physical_to_logical):
        blocks = [{expert // size for expert in row[first : first + size]} for first in range(0, len(row), size)]
        if len(row) != plan.model.num_experts or max(map(len, blocks)) > 1:
            raise CertificationError(f"layer {layer}: an expert group is split; expected one in every {size} slots")
