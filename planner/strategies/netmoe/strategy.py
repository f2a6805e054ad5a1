"""NetMoE: every layer's combine delivers each sample to the device where its next experts are (solvers/netmoe).

Legend: I samples; L MoE layers; D devices.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ....runtime.decisions import DispatchModel, SamplePolicyDecision
from ....runtime.migrating.predictor import Predictor
from ....runtime.plan import Plan
from ....solvers.luffy import Law
from ....solvers.netmoe import compile_rehoming
from ....solvers.outcome import ROUNDING, Objective, Outcome, Status
from ....traces.count_form import CountTrace
from ...evaluate.evaluate import Evaluated
from ...evaluate.homes import Dealing, Rehoming, Totals, stay
from ...evaluate.journey import Contender, Journey, today
from ...evaluate.metrics import COPIES, EXCHANGE, FAR_BYTES, NODE_COPIES
from ...evaluate.scene import Scene
from ...figures import percent
from ...params import Params
from ...task import Task
from ..strategy import Solution, Strategy, sidecar
from . import NetmoeParams
from .options import PLAN, SamplePolicyOptions
from .policy import TRIED, fitted_predictor, locality, over, tried
from .recheck import recheck
from .sections import remarks, sections

PAYS_FROM = 0.02  # of bytes, copies or their seconds: what follows a sample (labels, masks) and the solves are extra


class Netmoe(Strategy):
    """Samples are re-homed at every layer, by this layer's routing and a prediction of the next one's."""

    name = "netmoe"
    decides = "sample_policy"
    dispatch_models = ("migrating",)
    beside = frozenset({"placement", "pipeline"})
    by_steps = True
    shifts_load = False
    uses = frozenset({"prefill", "training"})
    min_gain = PAYS_FROM
    moves_samples = True
    objectives: ClassVar = {
        "link_cost": ("a re-homing costs, in copies inside a node,", ",.1f"),
        "exchange_s": ("the exchanges of a layer take", "s"),
        "busiest_cost": ("the busiest port carries, in copies inside a node,", ".1f"),
    }
    recheck = staticmethod(recheck)
    remarks = staticmethod(remarks)
    sections = staticmethod(sections)

    def variants(self, task: Task, engine: str | None = None) -> Sequence[Params]:
        """No variants where attention is timed, too: luffy weighs it beside the exchanges there."""
        costs = task.scene.costs
        timed = costs is not None and costs.attention is not None and costs.exchange
        return () if timed else super().variants(task, engine)

    def judged_on(self, scene: Scene, dispatch_model: DispatchModel) -> str:
        """Seconds of both exchanges; where nothing times them, bytes between nodes, copies where bytes are not known;
        on one node copies between devices.
        """
        if scene.costs is not None and scene.costs.exchange:
            return EXCHANGE
        if scene.cluster.num_nodes == 1:
            return COPIES
        return FAR_BYTES if scene.model.copy_bytes else NODE_COPIES

    def solve(self, task: Task) -> Solution:
        """Fit the predictor, and choose the method where none is asked for."""
        asked, tried_s = NetmoeParams.of(task.params).method, dict[str, float]()
        several = asked is None and task.scene.costs is not None and bool(task.scene.costs.exchange)
        method: str = asked or TRIED[0]
        predictor = None if method == "paper" else fitted_predictor(task, task.placement)
        compiled_s = sum(compile_rehoming(one, task.request.cluster) for one in (TRIED if several else [method]))
        if several:
            task.say(f"trying {', '.join(TRIED)} on the fitted steps")
            tried_s = tried(task, predictor)
            method = min(TRIED, key=lambda one: tried_s[one])
        return policy_of(task, method, predictor, compiled_s, asked=asked is not None, tried_s=tried_s)

    def bound(self, journey: Journey) -> Journey:
        """Journey with the least copies that any homes leave to each port."""
        return replace(journey, dispatch_model="migrating", homes=stay, least=True)

    def journey_of_plan(self, task: Task, plan: Plan, journey: Journey) -> Journey:
        """The plan's journey, bounded on the fitted steps."""
        assert isinstance(journey.homes, Rehoming)
        return replace(journey, homes=replace(journey.homes, bounded=task.scene.cohorts[0] if task.bounds else None))

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """The plan that knows the next layer (oracle), that does not look at it (unpredicted), samples dealt by length
        before the first layer (dealt); under a base's placement samples that stay (base), and the policy fitted under
        contiguous experts.
        """
        planned = Contender("plan", journey)
        assert isinstance(journey.homes, Rehoming)
        rows = [planned.named("oracle", homes=replace(journey.homes, oracle=True, bounded=None))]
        if journey.homes.predictor is not None:
            rows.append(planned.named("unpredicted", homes=replace(journey.homes, predictor=None, bounded=None)))
        if task.base is not None and task.base.decisions.names:
            rows.append(planned.named("base", dispatch_model="standard", homes=stay))
        if plan.placement is not None:
            in_order = today(plan.model, plan.cluster, journey.placement.slots).journey.placement
            predictor = None if journey.homes.predictor is None else fitted_predictor(task, in_order)
            rehoming = replace(journey.homes, predictor=predictor, bounded=None)
            rows.append(planned.named("contiguous", placement=in_order, homes=rehoming))
        return [*rows, planned.named("dealt", dispatch_model="standard", homes=Dealing())]

    def with_figures(self, task: Task, solution: Solution, evaluated: Evaluated) -> Solution:
        """The solution with what was reached on the fitted steps, and what simpler ways leave of its gain."""
        assert isinstance(solution.decision, SamplePolicyDecision)
        return replace(
            solution,
            options=solution.options.model_copy(update=over(self.judged_on(task.scene, "migrating"), evaluated)),
            outcome=reached(evaluated.homes[PLAN][0].totals, solution.outcome.compiled_s),
        )


def policy_of(
    task: Task,
    method: str,
    predictor: Predictor | None,
    compiled_s: float,
    *,
    asked: bool,
    tried_s: Mapping[str, float] | None = None,
    law: Law | None = None,
) -> Solution:
    """The solution that is a policy, with the locality index; its outcome is known once it was judged."""
    index = locality(task)
    task.say(f"locality index {percent(index.share, 1)}: no homes save a larger share; re-homing the samples online")
    named, sidecars = sidecar("predictor", None if predictor is None else predictor.to_bytes())
    layers = tuple(range(task.model.num_layers))
    decision = SamplePolicyDecision(method=method, layers=layers, predictor=named, attention=law)
    options = SamplePolicyOptions(
        copies="pairs" if isinstance(task.source, CountTrace) else "devices",
        blind_copies=index.blind,
        least_copies=index.least,
        asked=asked,
        tried_s=tried_s or {},
    )
    return Solution(decision, options, reached(Totals(), compiled_s), sidecars=sidecars)


def reached(totals: Totals, compiled_s: float) -> Outcome:
    """The mean over the re-homings of the fitted steps of what was reached, next layers as predicted."""
    value, bound = (total / max(totals.layers, 1) for total in (totals.value, totals.bound))
    outcome = Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective(totals.name, value, "min"),
        bound=bound,
        bound_kind=totals.bound_kind,
        proven=value <= bound * (1 + ROUNDING),
        started=time.perf_counter() - totals.wall_s,
        backend=totals.backend,
    )
    return replace(outcome, compiled_s=compiled_s)


STRATEGY = Netmoe()
