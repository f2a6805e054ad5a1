"""The order of the experts of every MoE layer: from a plan, and reversed.

Legend: E experts a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...errors import MismatchError, UsageError
from ...solvers.whole_groups import keeps_groups_whole
from ...traces.model import ModelSpec
from ..plan import Plan

__all__ = ["Permutation", "permutation_of"]


@dataclass(frozen=True)
class Permutation:
    """For hidden layer i, the old expert that the new expert s is: `old[i][s]`, E numbers, each once."""

    old: Mapping[int, tuple[int, ...]]

    @property
    def num_experts(self) -> int:
        """E."""
        return len(next(iter(self.old.values())))

    @cached_property
    def new(self) -> dict[int, tuple[int, ...]]:
        """For hidden layer i, the new expert that the old expert e becomes: `new[i][e]`."""
        return {layer: tuple(np.argsort(old_E).tolist()) for layer, old_E in self.old.items()}

    @property
    def inverse(self) -> "Permutation":
        """The permutation that undoes this one."""
        return Permutation(self.new)


def permutation_of(plan: Plan, model: ModelSpec) -> Permutation:
    """The permutation that gives the experts of a checkpoint's `model` the plan's order.

    Raises
    ------
    UsageError
        The plan decides no placement, or one that no order of experts expresses: replicas, devices with unequal
        numbers of slots, or groups of experts torn apart where the model chooses among groups first.
    MismatchError
        The plan is of another number of experts.
    """
    placement = plan.placement
    if placement is None:
        raise UsageError("the plan decides no placement; expected one: moeplan solve --strategy exflow or eplb")
    if placement.has_replicas:
        raise UsageError(
            f"the plan has {placement.num_slots} slots a layer for {placement.num_experts} experts; a checkpoint holds"
            f" every expert once: re-run moeplan solve without --redundant and --slots, for devices that divide"
            f" {placement.num_experts}"
        )
    if len(set(placement.slots.tolist())) > 1:
        raise UsageError(
            f"the plan gives devices {placement.slots.min()} to {placement.slots.max()} slots; engines cut a"
            " checkpoint's experts into equal runs: re-run moeplan solve without --slots and --dead"
        )
    if plan.model.num_experts != model.num_experts:
        raise MismatchError(
            f"the plan is of {plan.model.num_experts} experts a layer, the checkpoint has {model.num_experts};"
            " expected the model that the plan's trace was recorded of"
        )
    limited = next((spec for spec in (model, plan.model) if spec.top_k_groups and spec.num_expert_groups), None)
    if limited is not None and not keeps_groups_whole(placement, limited.num_expert_groups or 1):
        raise UsageError(
            f"the plan tears groups of experts apart, and {limited.name} chooses {limited.top_k_groups} of"
            f" {limited.num_expert_groups} groups by where they lie: re-run moeplan solve --groups whole"
        )
    rows = placement.physical_to_logical.tolist()
    return Permutation({layer: tuple(row) for layer, row in zip(plan.model.layer_ids, rows, strict=True)})
