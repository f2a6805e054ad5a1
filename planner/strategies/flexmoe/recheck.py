"""Checks of a flexmoe plan by certify: its start, its policy, its schedule."""

from ....errors import CertificationError
from ....runtime.plan import Plan
from ....runtime.schedule import PLAN, Schedule
from ...certify.certificate import Certificate
from ...evaluate.choosers import step_pairs
from ..strategy import Recheck
from .options import RebalancingOptions
from .rates import UNTIMED, rates
from .rules import START, record_of, rules_of, scheduled, window_balance


def recheck(plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
    """Recheck the start's room and balance, and that the schedule leads from one legal placement to the next."""
    decision, options, start = plan.decisions.rebalancing, RebalancingOptions.of(plan), plan.placement
    assert decision is not None
    assert start is not None
    if {*start.slots.tolist()} != {options.slots} or start.replica_rule != "quota":
        raise CertificationError(
            f"a start of {sorted({*start.slots.tolist()})} slots per device by rule {start.replica_rule}; expected"
            f" {options.slots} by quota"
        )
    if options.horizon not in (None, decision.horizon_steps):
        raise CertificationError(f"horizon {decision.horizon_steps:g}, and {options.horizon:g} was asked for")
    record = options.followed.get(PLAN)
    if record is None or (decision.method == "search" and record.violations):
        raise CertificationError("no record of what the policy did, or of changes that cost more than they save")
    if "rebalancing" not in plan.outcome:
        return
    goal = plan.outcome["rebalancing"]
    claimed = goal.objective.name, goal.objective.sense, goal.bound, goal.bound_kind
    if claimed != ("window_balance", "min", 1.0, "mean load"):
        raise CertificationError(
            f"objective {goal.objective.sense} {goal.objective.name} above {goal.bound} ({goal.bound_kind});"
            " expected min window_balance above 1.0 (mean load)"
        )
    if again is None or decision.schedule is None:
        return
    schedule = Schedule.from_bytes(decision.schedule.read(again.folder), plan.model.num_layers)
    task = again.task
    pairs, group = [steps[:-1] for steps in step_pairs(task.scene)], plan.cluster.devices_per_node
    runs = {name: rule.run(pairs[-1], start, group) for name, rule in rules_of(task, decision).items()}
    expected = scheduled(task.scene, runs)
    if schedule.to_bytes() != expected.to_bytes():
        raise CertificationError("the schedule beside the plan is not what its rules do on the steps that judge")
    if {*options.followed} != {*runs}:
        raise CertificationError(f"records of {', '.join(options.followed)}; expected {', '.join(runs)}")
    for name, run in runs.items():
        told = options.followed[name].model_dump(exclude={"planning_s"})
        for what, value in record_of(run, decision, timed=options.timed).model_dump(exclude={"planning_s"}).items():
            certificate.agree(f"{name}: {what}", told[what], value)
    timed = rates(task.scene, pairs[0], options.slots, task.wire)
    if options.timed and timed is None:
        certificate.unchecked.append("rates by which the policy decides")
    else:
        for rate, value in (timed[0] if timed and options.timed else UNTIMED)._asdict().items():
            certificate.agree(f"rate {rate}", decision.costs[rate], float(value))
    value = window_balance(pairs[0][-START:], start)
    certificate.agree("objective", goal.objective.value, value)
    certificate.checked("objective, schedule and what the policy did")
    certificate.unchecked.append("what was tried on the fitted steps")
