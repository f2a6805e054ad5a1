"""A strategy from outside: a decision, its effect, a metric and a flag, one row of a registry each.

As a script it is the command line with that strategy.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeplan.planner.certify import Certificate
from moeplan.planner.document import Section, Text
from moeplan.planner.evaluate.evaluate import evaluate
from moeplan.planner.evaluate.journey import EFFECTS, Contender, Journey, today
from moeplan.planner.evaluate.metrics import METRICS, MetricSpec
from moeplan.planner.evaluate.sums import Context, Sums
from moeplan.planner.params import Params, flag
from moeplan.planner.strategies.registry import STRATEGIES, Row
from moeplan.planner.strategies.strategy import Recheck, Solution, Strategy
from moeplan.planner.task import Task
from moeplan.profilers.cluster import Cluster
from moeplan.runtime.decisions import DECISIONS, Decision, Record
from moeplan.runtime.plan import Part, Plan
from moeplan.solvers.outcome import Objective, Outcome, Status
from moeplan.solvers.placement import Placement
from moeplan.traces.model import ModelSpec

NAME = "rotation"


class RotationDecision(Decision):
    """Experts of every layer go some slots further than in the layer before."""

    key = NAME
    dispatch_models = ("standard",)

    by: int

    def check(self, model: ModelSpec, _cluster: Cluster, /) -> None:
        """Refuse a turn that is none."""
        if not 0 <= self.by < model.num_experts:
            raise ValueError(f"rotation by {self.by}; expected 0 to {model.num_experts - 1}")


class RotationOptions(Record):
    """How many turns were tried."""

    tried: int


@dataclass(frozen=True, kw_only=True)
class RotationParams(Params):
    """How far experts may go."""

    most_slots: int = flag(3, "Slots at most.", at_least=0, at_most=64, expected="0 to 64")


def rotated(journey: Journey, by: int) -> Journey:
    """The journey with the experts of layer l `l by` slots further."""
    placed = journey.placement
    held = [
        [
            [(expert + layer * by) % placed.num_experts for expert in placed.held(layer, d)]
            for d in range(placed.num_devices)
        ]
        for layer in range(placed.num_layers)
    ]
    return replace(journey, placement=Placement.from_sets(held, placed.num_experts))


def far_share(sums: Sums, _: Context) -> Any:
    """Of all copies, those to other nodes."""
    copies = sums.counts.get("device_copies")
    return None if copies is None else {"": np.atleast_2d(sums.counts["far_copies"] / copies)}


class Rotation(Strategy):
    """Experts of every layer go some slots further than in the layer before."""

    name = NAME
    decides = NAME

    def judged_on(self, *_: Any) -> str:
        """The metric that came along."""
        return "far_share"

    def solve(self, task: Task) -> Solution:
        """Take the turn with the smallest share of copies to other nodes on the fitted part."""
        started, shares = time.perf_counter(), self.shares(task)
        return Solution(
            decision=RotationDecision(by=int(np.argmin(shares))),
            options=RotationOptions(tried=len(shares)),
            outcome=Outcome.of(
                status=Status.FEASIBLE,
                objective=Objective("far_share", min(shares), "min"),
                started=started,
                backend="rotation",
            ),
        )

    def shares(self, task: Task) -> list[float]:
        """The share under each turn."""
        usual = today(task.model, task.request.cluster).journey
        turns = range(task.params.most_slots + 1)  # type: ignore[attr-defined]
        contenders = [Contender(f"by {by}", rotated(usual, by)) for by in turns]
        fit = evaluate(replace(task.scene, cohorts=task.scene.cohorts[:1]), contenders).evaluation.fit
        return [one.metrics["far_share"].value for one in fit.contenders]

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> list[Contender]:
        """A turn of one."""
        return [Contender("by 1", rotated(today(plan.model, plan.cluster).journey, 1))]

    def recheck(self, plan: Plan, again: Recheck | None, certificate: Certificate) -> None:
        """The objective is the plan's own share on the fitted part."""
        if again is not None and again.evaluated is not None:
            share = again.evaluated.evaluation.fit.contenders[0].metrics["far_share"].value
            certificate.agree("objective of rotation", plan.outcome[NAME].objective.value, share)
            certificate.checked("objective of rotation")

    def remarks(self, plan: Plan, part: Part) -> Iterator[str]:
        """How far experts go."""
        yield f"experts go {turn_of(plan)} slots further in each layer"

    def sections(self, plan: Plan, width: int) -> Iterator[Section]:
        """What was tried."""
        yield Section("Rotation", (Text.of(f"tried {plan.options[NAME]['tried']} turns"),), verbose=True)


def turn_of(plan: Plan) -> int:
    """By how many slots a plan turns."""
    (decision,) = (one for one in plan.decisions.made if isinstance(one, RotationDecision))
    return decision.by


STRATEGY = Rotation()
SPEC = MetricSpec(
    name="far_share",
    column="far",
    noun="share of copies between nodes",
    meaning="share of the copies that go to other nodes",
    unit="share",
    per="sample",
    needs="a trace of tokens",
    compute=far_share,
)


def register(put: Callable[[dict[str, Any], str, Any], None]) -> None:
    """Add a row to every registry."""
    put(DECISIONS, NAME, RotationDecision)
    put(EFFECTS, NAME, lambda journey, plan, _: rotated(journey, turn_of(plan)))
    put(METRICS, SPEC.name, SPEC)
    put(STRATEGIES, NAME, Row(RotationParams, __name__))


if __name__ == "__main__":
    register(dict.__setitem__)
    from moeplan.planner.cli import main

    main()
