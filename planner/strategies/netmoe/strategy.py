"""NetMoE: every layer's combine delivers each sample to the device where its next experts are (solvers/netmoe).

Legend: I samples; L MoE layers; D devices.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ....runtime.decisions import DispatchModel, SamplePolicyDecision, SidecarFile
from ....runtime.migrating.predictor import Predictor
from ....runtime.plan import Part, Plan
from ....solvers import netmoe
from ....solvers.assignment import backend_of
from ....solvers.netmoe import METHODS, compile_rehoming
from ....solvers.outcome import ROUNDING, Objective, Outcome, Status
from ....solvers.placement import Placement
from ....traces.count_form import CountTrace
from ...document import Section
from ...evaluate.evaluate import Evaluated, evaluate, verdict
from ...evaluate.homes import Dealt, Rehoming, Staying, Totals, steps_of
from ...evaluate.journey import Contender, Journey, today
from ...evaluate.metrics import COPIES, EXCHANGE, FAR_BYTES, NODE_COPIES
from ...evaluate.price import SOURCES
from ...evaluate.replay import Replay
from ...evaluate.replay import replay as fast_replay
from ...evaluate.scene import Scene
from ...task import Task
from ..registry import NetmoeParams
from ..strategy import Again, Check, Solution, Strategy, Told
from . import sections
from .policy import SamplePolicyOptions
from .predictor import fit_predictor

__all__ = ["PLAN", "STRATEGY", "TRIED", "fitted_predictor", "tried"]

PAYS_FROM = 0.02  # of bytes, copies or their seconds: what follows a sample (labels, masks) and the solves are extra
TRIED = ("sum", "even", "bottleneck")  # where exchanges are timed and no method is asked for
PLAN = "plan/migrating"


class Netmoe(Strategy):
    """Samples are re-homed at every layer, by this layer's routing and a prediction of the next one's."""

    name = "netmoe"
    decides = "sample_policy"
    dispatch_models = ("migrating",)
    beside = frozenset({"placement", "pipeline"})
    pays_from = PAYS_FROM
    moves_samples = True

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
        """Fit the predictor, and choose the method where none is asked for.

        Raises
        ------
        UsageError
            The trace has no samples, or a placement with replicas that its traffic does not follow.
        """
        assert isinstance(task.params, NetmoeParams)
        asked, tried_s = task.params.method, dict[str, float]()
        several = asked is None and task.costs is not None and bool(task.costs.exchange)
        method: str = asked or TRIED[0]
        predictor = None if method == "paper" else fitted_predictor(task, task.placement)
        compiled_s = sum(compile_rehoming(one, task.request.cluster) for one in (TRIED if several else [method]))
        if several:
            task.say(f"trying {', '.join(TRIED)} on the fitted steps")
            tried_s = tried(task, predictor)
            method = min(TRIED, key=lambda one: tried_s[one])
        locality = _locality(task)
        task.say(f"locality index {locality.share:.1%}: no homes save a larger share; re-homing the samples online")
        return Solution(
            decision=SamplePolicyDecision(
                method=method,
                layers=tuple(range(task.model.num_layers)),
                predictor=None if predictor is None else SidecarFile(file=predictor.file_name, sha256=_sha(predictor)),
            ),
            options=SamplePolicyOptions(
                copies="pairs" if isinstance(task.source, CountTrace) else "devices",
                blind_copies=locality.blind,
                least_copies=locality.least,
                asked=asked is not None,
                tried_s=tried_s,
            ),
            outcome=_outcome(Totals(), method, compiled_s),
            sidecars={} if predictor is None else {predictor.file_name: predictor.to_bytes()},
        )

    def recheck(self, plan: Plan, again: Again | None) -> Iterator[Check | Told]:
        """Predictor, homes' costs and bounds, locality, and the methods tried."""
        from .recheck import recheck

        return recheck(plan, again)

    def remarks(self, plan: Plan, part: Part) -> Iterator[str]:
        """Remarks on samples moved, what that saves, and what does as well."""
        yield from sections.remarks(plan, part)

    def sections(self, plan: Plan, width: int) -> Iterator[Section]:
        """The locality index, costs and methods tried."""
        if plan.evaluation is not None:
            yield sections.section(plan, plan.evaluation.judging)

    def own(self, task: Task, journey: Journey) -> Journey:
        """The plan's journey, bounded on the fitted steps."""
        assert isinstance(journey.homes, Rehoming)
        return replace(journey, homes=replace(journey.homes, bounded=task.cohorts[0] if task.bounds else None))

    def rivals(self, task: Task, plan: Plan, journey: Journey) -> Sequence[Contender]:
        """The plan that knows the next layer (oracle), that does not look at it (unpredicted), samples dealt by length
        before the first layer (dealt); under a base's placement samples that stay (base), and the policy fitted under
        contiguous experts.
        """
        own = Contender("plan", journey)
        assert isinstance(journey.homes, Rehoming)
        rows = [own.named("oracle", homes=replace(journey.homes, oracle=True, bounded=None))]
        if journey.homes.predictor is not None:
            rows.append(own.named("unpredicted", homes=Rehoming(journey.homes.method)))
        if task.base is not None and task.base.decisions.names:
            rows.append(own.named("base", dispatch_model="standard", homes=Staying()))
        if plan.placement is not None:
            in_order = today(plan.model, plan.cluster).journey.placement
            predictor = None if journey.homes.predictor is None else fitted_predictor(task, in_order)
            rehoming = Rehoming(journey.homes.method, predictor)
            rows.append(own.named("contiguous", placement=in_order, homes=rehoming))
        return [*rows, own.named("dealt", dispatch_model="standard", homes=Dealt())]

    def finished(self, task: Task, solution: Solution, evaluated: Evaluated) -> Solution:
        """The solution with what was reached on the fitted steps, and what dealing samples by length leaves of it."""
        assert isinstance(solution.options, SamplePolicyOptions)
        assert isinstance(solution.decision, SamplePolicyDecision)
        over = verdict(evaluated, self.judged_on(task.scene, "migrating"), against="dealt/standard").gain
        totals = evaluated.homes[PLAN][0].totals
        return replace(
            solution,
            options=solution.options.model_copy(update={"over_dealt": over}),
            outcome=_outcome(totals, solution.decision.method, solution.outcome.compiled_s),
        )


def fitted_predictor(task: Task, placement: Placement) -> Predictor:
    """The predictor of the fitted samples under a placement."""
    assert task.samples is not None
    traffic = task.samples.under(placement)
    assert task.samples.experts is not None
    return fit_predictor(task.samples.experts, traffic, task.fitted, task.model.top_k)


def tried(task: Task, predictor: Predictor | None, replay: Replay = fast_replay) -> dict[str, float]:
    """Seconds of the timed parts of a fitted step under each method."""
    fitted = replace(task.scene, cohorts=task.cohorts[:1])
    contenders = [
        Contender(method, Journey("migrating", task.placement, homes=Rehoming(method, predictor))) for method in TRIED
    ]
    part = evaluate(fitted, contenders, replay=replay).evaluation.fit
    return {
        one.name: sum(one.metrics[name].value for name in SOURCES if name in one.metrics) for one in part.contenders
    }


def _locality(task: Task) -> netmoe.Locality:
    """Blind and least copies per fitted step, next layers known."""
    assert task.samples is not None
    cluster, traffic, cohort = task.request.cluster, task.samples.under(task.placement), task.cohorts[0]
    assert cohort.step is not None
    here_D = np.arange(cluster.num_devices)
    blind = least = 0.0
    for at in steps_of(cohort.step):
        place = cohort.unit_ids[at]
        room_D = np.full(len(here_D), -(-len(at) // len(here_D)))
        for layer in range(task.model.num_layers):
            following = traffic.following(layer, place)
            crossing = netmoe.traffic_of(traffic.copies[place, layer], here_D, cluster, next_counts=following)
            index = netmoe.locality(crossing, room_D, cluster)
            blind, least = blind + index.blind, least + max(index.least, 0.0)
    return netmoe.Locality(blind / cohort.num_steps, least / cohort.num_steps)


def _outcome(totals: Totals, method: str, compiled_s: float) -> Outcome:
    """The mean over the re-homings of the fitted steps of what was reached, next layers as predicted."""
    value, bound = (total / max(totals.layers, 1) for total in (totals.value, totals.bound))
    outcome = Outcome.of(
        status=Status.FEASIBLE,
        objective=Objective(totals.name or "link_cost", value, "min"),
        bound=bound,
        bound_kind="weighted ports" if METHODS[method].goal == "bottleneck" else "transportation",
        proven=value <= bound * (1 + ROUNDING),
        started=time.perf_counter() - totals.wall_s,
        backend=backend_of(METHODS[method].assignment),
    )
    return replace(outcome, compiled_s=compiled_s)


def _sha(predictor: Predictor) -> str:
    return hashlib.sha256(predictor.to_bytes()).hexdigest()


STRATEGY = Netmoe()
