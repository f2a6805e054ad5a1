"""The rule of whole expert groups: each in one block of slots of its own."""

from ...errors import CertificationError
from ...runtime.plan import Plan

__all__ = ["check_groups"]


def check_groups(plan: Plan) -> None:
    """Refuse a placement that splits a group."""
    decision, groups = plan.decisions.placement, plan.model.num_expert_groups
    assert decision is not None
    if not groups or plan.model.num_experts % groups:
        raise CertificationError("whole expert groups of a model without such groups")
    size = plan.model.num_experts // groups
    for layer, row in enumerate(decision.physical_to_logical):
        blocks = [{expert // size for expert in row[first : first + size]} for first in range(0, len(row), size)]
        if len(row) != plan.model.num_experts or max(map(len, blocks)) > 1:
            raise CertificationError(f"layer {layer}: an expert group is split; expected one in every {size} slots")
