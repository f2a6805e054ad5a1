"""Recheck of an eplb plan: the balance reached, the experts it had to keep, and the arithmetic of its candidates.

Legend: B steps; L MoE layers; E experts.
"""

from collections.abc import Iterator

import numpy as np

from ....errors import CertificationError
from ....runtime.plan import Plan
from ....solvers.balance import balance, step_balance
from ....solvers.placement import Placement
from ...certify.recounted import Fitted, count_fitted
from ...evaluate.metrics import BALANCE, TAIL
from ...options import EvaluationOptions, PlacementOptions, Redundancy
from ..placement import check_goal, check_groups, placement_options
from ..strategy import Again, Check, Told

OWN = ("groups", "dead", "pins", "quantile", "raw", "redundancy", "swaps", "mixture")


def recheck(plan: Plan, again: Again | None) -> Iterator[Check | Told]:
    """Recheck a plan as `Strategy.recheck` says."""
    options, placement = placement_options(plan, "eplb", OWN), plan.placement
    assert placement is not None
    _check_kept(plan, placement, options)
    if options.redundancy is not None:
        yield from _redundancy(plan, placement, options.redundancy, options.dead)
    if options.raw or options.swaps:
        yield Told("EPLB unrepaired, and plans of a phase judged on another", checked=False)
    if options.dead or options.pins or options.groups == "whole":
        yield Told("dead devices, pins and whole groups", checked=True)
    if "placement" not in plan.outcome:
        return
    check_goal(plan, _names(plan, options), "min", {"mean", "largest replica"})
    if again is None:
        return
    yield Told("slots that were repaired", checked=False)
    fitted = count_fitted(again.task, followed=0, beside=False)
    goal = plan.outcome["placement"].objective
    yield Check("objective", goal.value, _objective(placement, goal.name, options.quantile, fitted))
    yield Told("objective", checked=True)
    if (kind := plan.outcome["placement"].bound_kind) is not None:
        yield Told(f"bound ({kind})", checked=False)


def _check_kept(plan: Plan, placement: Placement, options: PlacementOptions) -> None:
    """Refuse a placement that does not keep what its options say that it was asked to."""
    for rank in options.dead:
        if rank >= placement.num_devices or placement.slots[rank]:
            raise CertificationError(f"device {rank} is dead, and the plan puts experts there; expected no slot")
    if empty := [*{*np.flatnonzero(placement.slots == 0).tolist()} - {*options.dead}]:
        raise CertificationError(f"device {empty[0]} has no slot, and is not dead; expected experts there")
    for layer in range(placement.num_layers):
        for expert, device in options.pins:
            if device >= placement.num_devices or expert not in placement.held(layer, device):
                raise CertificationError(f"layer {layer}: expert {expert} is pinned to device {device}, and not there")
    if options.groups == "whole":
        check_groups(plan)


def _names(plan: Plan, options: PlacementOptions) -> tuple[str, ...]:
    """Objectives that eplb may have minimised: balance over recorded steps, or of all loads together."""
    if options.quantile is not None:
        return (f"step_balance_p{100 * options.quantile:g}",)
    evaluation = EvaluationOptions.of(plan)
    by_step = options.method == "refined" and not options.mixture and evaluation.step == "recorded"
    return ("step_balance", "balance") if by_step else ("balance",)


def _objective(placement: Placement, name: str, quantile: float | None, fitted: Fitted) -> float:
    """The balance of all loads together, or of steps."""
    if not name.startswith("step"):
        return balance(fitted.loads.astype(np.float64), placement)
    return step_balance(fitted.steps.astype(np.float64), placement, quantile)


def _redundancy(
    plan: Plan, placement: Placement, redundancy: Redundancy, dead: tuple[int, ...]
) -> Iterator[Check | Told]:
    """Recheck that slots, and figures on the part that judges, are those of the chosen candidate."""
    widths = [width for rank, width in enumerate(placement.slots.tolist()) if rank not in dead]
    if {*widths} != {redundancy.chosen.slots}:
        raise CertificationError(
            f"{sorted({*widths})} slots a device; the redundancy that was weighed says {redundancy.chosen.slots}"
        )
    each = plan.model.expert_bytes
    for one in redundancy.candidates:
        held = None if each is None else one.slots * plan.model.num_layers * each
        yield Check("redundant experts", one.redundant, one.slots * len(widths) - plan.model.num_experts)
        yield Check("bytes of experts on a device", one.memory_bytes, held)
    if plan.evaluation is not None and plan.strategies[-1] == "eplb":  # else it was judged anew
        chosen, metrics = redundancy.chosen, plan.evaluation.judging.contenders[0].metrics
        yield Check("redundancy on held-out units", redundancy.held_out, plan.evaluation.held_out is not None)
        claimed: dict[str, float | None] = {BALANCE: chosen.balance, TAIL: chosen.balance_p95}
        if redundancy.metric != BALANCE or chosen.seconds is not None:
            claimed[redundancy.metric] = chosen.seconds
        for name, figure in claimed.items():
            yield Check(f"redundancy: {name}", figure, metrics[name].value if name in metrics else None)
    yield Told("what other numbers of redundant experts give", checked=False)
