"""Checks of a flexmoe plan by certify: its start, its policy, its schedule."""

from ....errors import CertificationError
from ....runtime.plan import Plan
from ....runtime.schedule import PLAN, Schedule
from ...certify.certificate import Certificate
from ...evaluate.replay import step_pairs
from ..strategy import Recheck
from .options import RebalancingOptions
from .rules import START, decides, rules_of, scheduled, window_balance


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
    if (goal.objective.name, goal.objective.sense, goal.bound) != ("window_balance", "min", 1.0):
        raise CertificationError(f"objective {goal.objective.sense} {goal.objective.name}; expected min window_balance")
    if again is None or decision.schedule is None:
        return
    schedule = Schedule.from_bytes(decision.schedule.read(again.folder), plan.model.num_layers)
    task = again.task
    pairs, group = [steps[:-1] for steps in step_pairs(task.scene)], plan.cluster.devices_per_node
    runs = {name: rule.run(pairs[-1], start, group) for name, rule in rules_of(task, decision).items()}
    expected = scheduled(task.scene, runs)
    if schedule.to_bytes() != expected.to_bytes():
        raise CertificationError("the schedule beside the plan is not what its rules do on the steps that judge")
    for name, run in runs.items():
        record = options.followed[name]
        certificate.agree(f"{name}: violations", record.violations, run.violations(decision.horizon_steps))
        certificate.agree(f"{name}: changes", record.changes, len(run.changes))
        certificate.agree(f"{name}: experts moved", record.experts_moved, run.moved)
        figure = run.over_steps(decides(timed=options.timed), decision.quantile or 0.0)
        certificate.agree(f"{name}: what decides, over the steps", record.figure, figure)
    value = window_balance(pairs[0][-START:], start)
    certificate.agree("objective", goal.objective.value, value)
    certificate.checked("objective, schedule and what the policy did")
    certificate.unchecked.append("what was tried on the fitted steps")
