"""The rules that a flexmoe plan is held against, and the balance that it starts with.

Legend: B steps; L MoE layers; E experts; D devices.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ....runtime.decisions import RebalancingDecision
from ....runtime.rebalancing import policy_of
from ....runtime.schedule import COLUMNS, KINDS, PLAN, Schedule
from ....solvers.flexmoe import Decide, EveryEplb, Paper, Run, Split, Stay
from ....solvers.placement import Placement
from ...evaluate.rebalancing import Following
from ...evaluate.scene import Scene
from ...task import Task
from .options import RuleRecord

START = 8  # last fitted steps that the first placement is made for
EPLB_STEPS = 100  # between two placements of the rival


def rules_of(task: Task, decision: RebalancingDecision) -> dict[str, Following]:
    """The plan's own rule and the others, by contender, once for all that ask in a task.

    The first placement, kept; EPLB every so many steps; the paper's scheduler.
    """
    key = ("rebalancing", decision.model_dump_json(exclude={"schedule"}))
    if key not in task.shared:
        every = max(round(EPLB_STEPS / decision.record_steps), 1)
        eplb = f"eplb every {every * decision.record_steps}"
        rules: dict[str, tuple[Decide, Split]] = {
            "static": (Stay(), "quota"),
            f"{eplb}, even": (EveryEplb(every), "even"),
            f"{eplb}, matched": (EveryEplb(every, matched=True), "quota"),
            "paper": (Paper(), "capacity"),
            "paper, all shrink": (Paper(all_shrink=True), "capacity"),
        }
        if decision.method == "paper":
            del rules["paper"]
        _, costs = policy_of(decision)
        settings = decision.record_steps, decision.horizon_steps, decision.quantile or 0.0, task.workers
        task.shared[key] = {
            PLAN: Following.of(decision, task.workers),
            **{name: Following(rule, costs, split, *settings) for name, (rule, split) in rules.items()},
        }
    known: dict[str, Following] = task.shared[key]
    return known


def record_of(run: Run, decision: RebalancingDecision, *, timed: bool) -> RuleRecord:
    """Record of what a rule did."""
    unpaid = sum(change.saved_s * change.records * decision.record_steps < change.price_s for change in run.changes)
    return RuleRecord(
        changes=len(run.changes),
        violations=run.violations(decision.horizon_steps),
        figure=run.over_steps(decides(timed=timed), decision.quantile or 0.0),
        unpaid=unpaid,
        experts_moved=run.moved,
        planning_s=run.planning_s,
    )


def scheduled(scene: Scene, runs: Mapping[str, Run]) -> Schedule:
    """Record of the plan on the part that judges, and the balance of all rules; layers without load are even."""
    steps = scene.cohorts[-1].step_ids
    assert steps is not None
    rows = [
        (int(steps[move.record]), move.layer, KINDS.index(move.kind), move.expert, move.source, move.target)
        for move in runs[PLAN].operations
    ]
    operations = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
    return Schedule(
        steps.astype(np.int64), operations, {name: np.maximum(run.balance, 1) for name, run in runs.items()}
    )


def decides(*, timed: bool) -> Literal["seconds", "balance"]:
    """Figure of a run by which policies are chosen."""
    return "seconds" if timed else "balance"


def window_balance(pairs: NDArray[np.integer], placement: Placement) -> float:
    """Max/mean load of steps `[B, L, E, D]`, each split exactly; mean over steps and layers that are used."""
    from ....solvers.step_split import split_ratios

    loads_BLE = pairs.sum(axis=3).astype(np.float64)
    used_BL = loads_BLE.any(axis=2)
    return float(split_ratios(loads_BLE, placement)[used_BL].mean())
