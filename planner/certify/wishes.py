"""What a placement was asked to keep: dead devices, pins, whole expert groups."""

from ...errors import CertificationError
from ...runtime.plan import Plan
from ...solvers import eplb
from ..options import PlacementOptions
from .certificate import Certificate
from .fitted import Fitted
from .redundancy import check_redundancy
from .structure import device_ratios, placement_options, slot_widths

__all__ = ["check_raw", "check_wishes"]


def check_wishes(plan: Plan, certificate: Certificate) -> None:
    """Refuse a placement that does not keep what its options say that it was asked to."""
    if plan.decisions.placement is None or "placement" not in plan.options:
        return
    options = placement_options(plan)
    rows, widths = plan.decisions.placement.physical_to_logical, slot_widths(plan)
    _check_kinds(options)
    for rank in options.dead:
        if rank >= len(widths) or widths[rank]:
            raise CertificationError(f"device {rank} is dead, and the plan puts experts there; expected no slot")
    device_of_slot = [device for device, width in enumerate(widths) for _ in range(width)]
    for layer, row in enumerate(rows):
        held = set(zip(row, device_of_slot, strict=True))
        for expert, device in options.pins:
            if (expert, device) not in held:
                raise CertificationError(f"layer {layer}: expert {expert} is pinned to device {device}, and not there")
        if options.groups == "whole":
            _check_groups(plan, layer, row)
    check_redundancy(plan, certificate)
    if options.swaps:
        certificate.unchecked.append("plans of a phase judged on another")
    if options.dead or options.pins or options.groups == "whole":
        certificate.checks.append("dead devices, pins and whole groups")


def check_raw(plan: Plan, fitted: Fitted, certificate: Certificate) -> None:
    """What EPLB gives as published, unrepaired; a baseline is what its algorithm gives."""
    raw = placement_options(plan).raw
    if raw is None:
        return
    groups, widths = plan.model.num_expert_groups, slot_widths(plan)
    found = eplb.raw_balance(fitted.loads, plan.cluster, slots=widths, num_groups=groups)
    repaired = eplb.solve(fitted.loads, plan.cluster, slots=widths, num_groups=groups, method="published").placement
    certificate.agree("raw EPLB: balance", raw.balance, found.balance)
    certificate.agree("raw EPLB: duplicates", raw.duplicates, found.duplicates)
    for claimed, rows in ((raw.plan, None), (raw.repaired, repaired.physical_to_logical)):
        ratios = device_ratios(plan, fitted.loads, rows)
        certificate.agree("balance on the fitted loads together", claimed, sum(ratios) / len(ratios))
    certificate.checks.append("raw EPLB")


def _check_kinds(options: PlacementOptions) -> None:
    """Refuse what only other strategies are asked for."""
    own = {"eplb": True, "exflow": options.groups == "whole"}.get(options.strategy, False)
    asked = (options.dead, options.pins, options.quantile, options.raw, options.redundancy, options.swaps)
    if (options.groups == "whole" and not own) or (any((*asked, options.mixture)) and options.strategy != "eplb"):
        raise CertificationError(f"options.placement of {options.strategy} with flags that it does not have")


def _check_groups(plan: Plan, layer: int, row: tuple[int, ...]) -> None:
    groups = plan.model.num_expert_groups
    if not groups or plan.model.num_experts % groups:
        raise CertificationError("whole expert groups of a model without such groups")
    size = plan.model.num_experts // groups
    blocks = [{expert // size for expert in row[first : first + size]} for first in range(0, len(row), size)]
    if len(row) != plan.model.num_experts or max(map(len, blocks)) > 1:
        raise CertificationError(f"layer {layer}: an expert group is split; expected one in every {size} slots")
