"""FlexMoE: replicas that follow the load while a model trains, from where they start and by a policy (solvers/flexmoe).

Legend: B steps; L MoE layers; E experts; D devices, S slots of each.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ....errors import InputError, UsageError
from ....runtime.decisions import DispatchModel, PlacementDecision, RebalancingDecision
from ....runtime.decisions.rebalancing import MOST_STEPS
from ....runtime.plan import Plan
from ....runtime.schedule import PLAN
from ....solvers.arrays import Ints
from ....solvers.flexmoe import Costs, Paper, Policy, initial
from ....solvers.flexmoe.initial import BALANCE_ALONE, DEEP
from ....solvers.outcome import ROUNDING, Objective, Outcome, Status
from ....solvers.placement import Placement, ReplicaRule, slots_for
from ....workers import Workers
from ...evaluate.choosers import step_pairs
from ...evaluate.journey import Contender, Journey
from ...evaluate.metrics import BALANCE
from ...evaluate.rebalancing import Following, check_steps
from ...evaluate.scene import BACKWARD, Passes, Scene
from ...params import Params
from ...task import Task
from ..strategy import Solution, Strategy, sidecar
from . import FlexmoeParams, timeline
from .options import RebalancingOptions
from .rates import UNTIMED, rates
from .recheck import recheck
from .rules import START, decides, record_of, rules_of, scheduled, window_balance
from .sections import remarks, sections, table

EXTRA = 2  # slots per device beyond one an expert that are tried where none are asked for
USUAL, HORIZONS = 100.0, (30.0, 100.0, 300.0)  # steps; those that are tried where none is asked for
WINDOWS = 4, 8, 12  # recorded steps over which a move must pay
TRIED_LAYERS, TRIED_STEPS = 4, 64  # on which slots and horizons are tried
Pairs = NDArray[np.int32]


class Flexmoe(Strategy):
    """Replicas follow the load of a training run."""

    name = "flexmoe"
    decides = "rebalancing"
    beside = frozenset({"pipeline"})
    by_time = True
    by_loads = True
    uses = frozenset({"training"})
    objectives: ClassVar = {
        "window_balance": ("split of the last fitted steps on the start, busiest device over the mean,", ".4f")
    }
    timeline: ClassVar = timeline
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)
    pictures = staticmethod(timeline.pictures)
    table = staticmethod(table)

    def check(self, task: Task) -> None:
        """Refuse a plan for serving: its experts do not learn, and eplb places their replicas."""
        if task.request.purpose == "serving":
            raise UsageError("--for serving with --strategy flexmoe, which is for training; give --strategy eplb")

    def passes(self, task: Task) -> Passes:
        """Both passes of training; of a base that cuts layers into chunks, its own."""
        return super().passes(task) or Passes(BACKWARD, full_duplex=False)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Balance, where seconds of a step are not known."""
        return BALANCE

    def variants(self, task: Task, engine: str | None = None) -> Sequence[Params]:
        """No variants: auto holds samples out by hash, and flexmoe by time."""
        return ()

    def why_auto_skips(self, task: Task) -> str:
        """Remark that it may be worth a solve of its own, where a training run's steps came in a known order."""
        source = task.source
        if task.use != "training" or "step" not in source.known or source.meta.step_order == "unknown":
            return ""
        return f"its replicas follow the load, which later steps judge: moeplan solve --strategy {self.name}"

    def solve(self, task: Task) -> Solution:
        """Place replicas for the last fitted steps; slots and horizon, where none are asked for, are tried on these."""
        check_steps(task.source, task.units.num_source_ranks, task.request.cluster.num_devices, self.name)
        params, scene, started = FlexmoeParams.of(task.params), task.scene, time.perf_counter()
        task.say("counting the pairs of every step")
        fitted, *others = (pairs[:-1] for pairs in step_pairs(scene))
        judging = others[0] if others else fitted
        if not fitted[-START:].any():
            raise InputError(
                f"{task.source.path}: no token of the last {START} fitted steps is routed; there is nothing to place by"
            )
        chosen, tried = _chosen(task, params, fitted)
        task.say("placing replicas for the last fitted steps")
        window, group = fitted[-START:], scene.cluster.devices_per_node
        placement = chosen.placement(window, group, task.workers)
        decision = chosen.decision(placement, scene.record_steps)
        task.say("following the load on the steps that judge")
        rules = rules_of(task, decision)
        for rule in rules.values():
            rule.run(judging[:2], placement, group)  # compiles what decides, which is no planning
        runs = {name: rule.run(judging, placement, group) for name, rule in rules.items()}
        named, sidecars = sidecar("schedule", scheduled(scene, runs).to_bytes())
        options = RebalancingOptions(
            slots=chosen.slots,
            horizon=params.horizon,
            timed=chosen.timed,
            tried=tried,
            followed={name: record_of(run, decision, timed=chosen.timed) for name, run in runs.items()},
        )
        balance = window_balance(window, placement)
        outcome = Outcome.of(
            status=Status.FEASIBLE,
            objective=Objective("window_balance", balance, "min"),
            bound=1.0,
            bound_kind="mean load",
            proven=balance <= 1 + ROUNDING,
            started=started,
            backend="flexmoe",
        )
        return Solution(decision.model_copy(update={"schedule": named}), options, outcome, sidecars=sidecars)

    def journey_of_plan(self, task: Task, plan: Plan, journey: Journey) -> Journey:
        """The plan's journey, by the rule whose runs are known already."""
        assert plan.decisions.rebalancing is not None
        return replace(journey, following=rules_of(task, plan.decisions.rebalancing)[PLAN])

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """Other rules from the same placement on."""
        decision, planned = plan.decisions.rebalancing, Contender(PLAN, journey)
        assert decision is not None
        return [planned.named(name, following=rule) for name, rule in rules_of(task, decision).items() if name != PLAN]


def filled(tables: Ints, loads: Ints, group: int) -> Ints:
    """Tables `[L, D, S]` without an empty slot: surplus ones hold replicas of the highest loads, `[L, E]`.

    On several nodes those of experts come first that no other node holds: their sums stay inside the node.
    """
    full = tables.copy()
    for of_layer, load_E in zip(full, loads, strict=True):
        count_E = np.bincount(of_layer[of_layer >= 0], minlength=len(load_E))
        for device, slot in np.argwhere(of_layer < 0).tolist():
            others = np.delete(of_layer, np.s_[device // group * group : (device // group + 1) * group], axis=0)
            share_E = load_E / count_E + load_E.sum() * ~np.isin(np.arange(len(load_E)), others)
            share_E[of_layer[device][of_layer[device] >= 0]] = -1
            of_layer[device, slot] = share_E.argmax()
            count_E[of_layer[device, slot]] += 1
    return full


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Room for replicas, and a policy."""

    slots: int
    horizon: float
    quantile: float  #: 0: the mean
    method: Literal["search", "paper"]
    costs: Costs
    fixed_s: float | None  #: Seconds of a layer beside what the costs tell; None: nothing is timed, balance decides
    window: int = WINDOWS[0]
    stays: bool = False  #: Whether nothing ever moves

    @property
    def name(self) -> str:
        """Name of this trial: the settings in which it differs from the others."""
        if self.stays:
            return f"{self.slots} slots, kept"
        return f"{self.slots} slots, {self.horizon:g} steps" + f", {self.window} records" * (self.window != WINDOWS[0])

    @property
    def timed(self) -> bool:
        """Check whether seconds decide."""
        return self.fixed_s is not None

    @property
    def policy(self) -> Policy:
        """The policy; without seconds it decides where the load is out of balance, and by that."""
        policy = Policy(horizon=self.horizon, quantile=self.quantile, window=self.window)
        if self.stays:
            return replace(policy, trigger=MOST_STEPS, every=0)
        return policy if self.timed else replace(policy, every=0, evaluations=0)

    def decision(self, placement: Placement, record_steps: int) -> RebalancingDecision:
        """The decision that starts at a placement."""
        searches, policy = self.method == "search", self.policy
        return RebalancingDecision(
            method=self.method,
            start=PlacementDecision.of(placement),
            trigger=policy.trigger if searches else Paper().threshold,
            horizon_steps=self.horizon,
            quantile=self.quantile or None,
            record_steps=record_steps,
            window=policy.window if searches else Paper().window,
            recent=policy.recent if searches and policy.recent < policy.window else None,
            every=policy.every if searches else 0,
            evaluations=policy.evaluations if searches else 0,
            costs={name: float(rate) for name, rate in self.costs._asdict().items()},
        )

    def placement(self, window: Pairs, group: int, workers: Workers | None) -> Placement:
        """The placement of few seconds, or of the best balance, for the steps of a window together."""
        records = np.ascontiguousarray(window[:, :, None], np.int64)
        policy = replace(DEEP if self.timed else BALANCE_ALONE, quantile=self.quantile)
        tables = initial(records, self.slots, self.costs, group=group, policy=policy, workers=workers)
        tables = filled(tables, window.sum(axis=(0, 3)), group)
        return Placement.from_sets(tables.tolist(), window.shape[2], ReplicaRule.QUOTA)

    def figure(self, pairs: Pairs, group: int, record_steps: int, workers: Workers | None) -> float:
        """Seconds of a layer, or max/mean load, on steps after the first few, for which it places."""
        placement = self.placement(pairs[:START], group, workers)
        later = pairs[START:] if len(pairs) > START else pairs
        run = Following.of(self.decision(placement, record_steps), workers).run(later, placement, group)
        return run.over_steps(decides(timed=self.timed), self.quantile) + (self.fixed_s or 0.0)


def _chosen(task: Task, params: FlexmoeParams, pairs: Pairs) -> tuple[_Candidate, dict[str, float]]:
    """The candidate of least figure on the fitted steps, and the figure of each that was tried.

    Tried in turn: slots, horizon, then the records over which a move must pay, beside a start that is kept. What was
    asked for is not tried.
    """
    model, devices, scene = task.model, task.request.cluster.num_devices, task.scene
    group, record_steps = scene.cluster.devices_per_node, scene.record_steps
    slots_for(model.num_experts, devices, params.slots)
    fewest = -(-model.num_experts // devices)
    most = min(fewest + EXTRA, model.num_experts)
    widths = [params.slots] if params.slots else [*range(min(fewest + 1, most), most + 1)]
    horizons = HORIZONS if params.horizon is None and params.method == "search" else [params.horizon or USUAL]
    layers = np.unique(np.linspace(0, model.num_layers - 1, TRIED_LAYERS).round().astype(np.int64))
    trials = len(widths) + (len(horizons) + len(WINDOWS) - 1 if params.method == "search" else 0)
    some, tried = np.ascontiguousarray(pairs[-TRIED_STEPS:, layers]), dict[str, float]()

    def best(candidates: Sequence[_Candidate]) -> _Candidate:
        """Candidate with the least figure; a single candidate is not tried."""
        if len(candidates) == 1:
            return candidates[0]
        for candidate in candidates:
            if candidate.name not in tried:
                task.say(f"trial {len(tried) + 1} of {trials}: {candidate.name}, on the fitted steps")
                tried[candidate.name] = candidate.figure(some, group, record_steps, task.workers)
        return min(candidates, key=lambda candidate: tried[candidate.name])

    usual = USUAL if USUAL in horizons else horizons[0]
    at_width = []
    for width in widths:
        costs, fixed_s = rates(scene, pairs, width, task.wire) or (UNTIMED, None)
        at_width.append(_Candidate(width, usual, params.quantile or 0.0, params.method, costs, fixed_s))
    room = best(at_width)
    chosen = best([replace(room, horizon=horizon) for horizon in horizons])
    if params.method == "search":
        chosen = best([*(replace(chosen, window=window) for window in WINDOWS), replace(chosen, stays=True)])
    return chosen, tried


STRATEGY = Flexmoe()
