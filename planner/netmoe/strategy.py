"""NetMoE as a strategy: count the samples, fit the predictor, re-home online, judge beside the oracle and the base.

Legend: I samples; L MoE layers; B steps; D devices.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...runtime.decisions import DispatchModel, PredictorFile, SamplePolicyDecision
from ...solvers import contiguous, netmoe
from ...solvers.assignment import backend_of
from ...solvers.outcome import ROUNDING, Objective, Outcome, Status, relative_gap
from ...solvers.placement import Placement
from ...traces.count_form import CountTrace
from ...traces.model import ModelSpec
from ..evaluate import Replayed, judge
from ..options import EvaluationOptions
from ..predicted import Predicted, predicted
from ..solved import Solved
from ..speeds import Speeds
from ..survey import Cohort
from ..task import Task
from .counted import Counted, Traffic, count_samples
from .moves import with_moves
from .online import METHODS, Homes, Totals, rehome, steps_of
from .policy import SamplePolicyOptions
from .predictor import Predictor, fit_predictor
from .roll import Roll, call_roll
from .tallied import tallied

__all__ = ["contenders_of", "judged_metric", "solve"]

Numbers = NDArray[np.int64]


def solve(task: Task) -> Solved:
    """The sample policy for a task.

    Raises
    ------
    UsageError
        The trace has no samples, or a placement with replicas that its traffic does not follow.
    """
    run = _Run.of(task)
    blind, least = run.locality()
    index = 1 - least / blind if blind else 0.0
    task.say(f"locality index {index:.1%}: no homes save a larger share; re-homing the samples online")
    rows = [run.row(place) for place in run.parts]
    cohorts = [run.cohort(place) for place in run.parts]
    found = judge(cohorts, [[one for one, _ in row] for row in rows], run.model, run.speeds, seed=task.request.seed)
    predictor = run.predictors.get("plan")
    name = None if predictor is None else PredictorFile(file=predictor.file_name, sha256=_sha256(predictor))
    return Solved(
        decision=SamplePolicyDecision(method=run.method, layers=tuple(range(run.model.num_layers)), predictor=name),
        options=SamplePolicyOptions(copies=run.copies, blind_copies=blind, least_copies=least),
        outcome=_outcome(rows[0][0][1].totals, run.method),
        evaluated=with_moves(found, cohorts, [[homes for _, homes in row] for row in rows], task.request.seed),
        against="base/standard" if run.has_base else "contiguous/standard",
        metric=judged_metric(run.cluster, run.model),
        judged_by=run.judged_by(task),
        num_tokens=int(run.roll.tokens.sum()) if isinstance(task.source, CountTrace) else None,
        sidecars={} if predictor is None else {predictor.file_name: predictor.to_bytes()},
    )


def contenders_of(*, has_base: bool) -> list[tuple[str, DispatchModel]]:
    """Name and dispatch model of the contenders, the plan first.

    `base` and `contiguous` are placements; under one of them "migrating" is the policy fitted there, "standard" leaves
    samples where they are. The oracle is the plan that knows the next layer.
    """
    found: list[tuple[str, DispatchModel]] = [("plan", "migrating"), ("oracle", "migrating")]
    if has_base:
        found += [("base", "standard"), ("contiguous", "migrating")]
    return [*found, ("contiguous", "standard")]


def judged_metric(cluster: Cluster, model: ModelSpec) -> str:
    """What the verdict is about where there is no `step_s`: bytes between nodes, copies where bytes are not known; on
    one node copies between devices.
    """
    if cluster.num_nodes == 1:
        return "device_copies"
    return "inter_bytes" if model.hidden_size and model.dtype_bytes else "node_copies"


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The samples of a task, counted and split, with what re-homes and times them.

    Parameters
    ----------
    parts
        Places in the roll of the fitted samples, then of those held out where there are any.
    predictors
        By placement, "plan" or "contiguous"; none where the method does not look at the next layer.
    """

    method: str
    cluster: Cluster
    model: ModelSpec
    samples_per_step: int
    roll: Roll
    counted: Counted
    parts: list[Numbers]
    predictors: Mapping[str, Predictor]
    speeds: Speeds | None
    has_base: bool

    @classmethod
    def of(cls, task: Task) -> "_Run":
        request, model, cluster = task.request, task.source.meta.model, task.request.cluster
        phases = request.phases or None
        task.say("reading the trace")
        roll = call_roll(task.source, phases=phases)
        fitted_I = roll.fitted(seed=request.seed, fraction=request.fit_fraction)
        placements = _placements(task, model, cluster)
        counted = count_samples(task.source, roll, fitted_I, placements, cluster, phases=phases)
        assert task.method is not None
        predictors = {
            name: fit_predictor(counted, traffic, fitted_I, model.top_k)
            for name, traffic in counted.traffic.items()
            if task.method != "paper"
        }
        return cls(
            task.method,
            cluster,
            model,
            request.step_samples,
            roll,
            counted,
            [np.flatnonzero(part) for part in (fitted_I, ~fitted_I) if part.any()],
            predictors,
            Speeds.of(task.profile, cluster, model, samples=True),
            "contiguous" in placements,
        )

    @property
    def copies(self) -> Literal["devices", "pairs"]:
        """What a copy is; see `SamplePolicyOptions`."""
        return "pairs" if self.counted.traffic["plan"].linked is None else "devices"

    def cohort(self, place: Numbers) -> Cohort:
        """The samples at these places as they run."""
        return self.roll.cohort(place, num_devices=self.cluster.num_devices, samples_per_step=self.samples_per_step)

    def locality(self) -> tuple[float, float]:
        """Blind and least copies a fitted step, next layers known."""
        place, traffic = self.parts[0], self.counted.traffic["plan"]
        cohort, here_D = self.cohort(place), np.arange(self.cluster.num_devices)
        assert cohort.step is not None
        blind = least = 0.0
        for at in steps_of(cohort.step):
            room_D = np.full(len(here_D), -(-len(at) // len(here_D)))
            for layer in range(self.model.num_layers):
                following = _next(traffic, layer, place[at])
                crossing = netmoe.traffic_of(
                    traffic.copies[place[at], layer], here_D, self.cluster, next_counts=following
                )
                index = netmoe.locality(crossing, room_D, self.cluster)
                blind, least = blind + index.blind, least + max(index.least, 0.0)
        return blind / cohort.num_steps, least / cohort.num_steps

    def row(self, place: Numbers) -> list[tuple[Replayed, Homes]]:
        """Every contender on the samples at these places."""
        return [self._contender(name, model, place) for name, model in contenders_of(has_base=self.has_base)]

    def judged_by(self, task: Task) -> EvaluationOptions:
        """How the plan is judged."""
        return EvaluationOptions(
            unit=self.roll.unit,
            phases=task.request.phases,
            samples_per_step=self.samples_per_step,
            home="source_rank" if self.roll.recorded_home(self.cluster.num_devices) else "ordinal",
            step="derived" if self.roll.step is None else "recorded",
        )

    def _contender(self, name: str, dispatch_model: DispatchModel, place: Numbers) -> tuple[Replayed, Homes]:
        traffic = self.counted.traffic["contiguous" if name == "contiguous" and self.has_base else "plan"]
        cohort = self.cohort(place)
        homes = self._homes(name, dispatch_model, traffic, place, cohort)
        tally = tallied(self.roll, traffic, place, cohort, homes.device, self.cluster)
        seconds = Predicted({}, {})
        if self.speeds is not None:
            seconds = predicted(tally, self.speeds, self.cluster, self.model, dispatch_model)
        return Replayed(name, dispatch_model, tally, seconds), homes

    def _homes(
        self, name: str, dispatch_model: DispatchModel, traffic: Traffic, place: Numbers, cohort: Cohort
    ) -> Homes:
        assert cohort.home is not None
        assert cohort.step is not None
        if dispatch_model == "standard":
            return Homes(np.tile(cohort.home, (self.model.num_layers + 1, 1)), Totals())
        predictor = self.predictors.get("contiguous" if name == "contiguous" else "plan")

        def predict(layer: int, at: Numbers) -> NDArray[np.float64] | None:
            if name == "oracle":
                return _next(traffic, layer, at)
            return None if predictor is None else predictor.copies(layer, self.counted.experts[at, layer])

        known = self.model.hidden_size and self.model.dtype_bytes
        return rehome(
            self.method,
            traffic,
            place,
            cohort.home,
            cohort.step,
            self.cluster,
            predict=predict,
            copy_bytes=float(self.model.hidden_size * self.model.dtype_bytes) if known else None,  # type: ignore[operator]
        )


def _placements(task: Task, model: ModelSpec, cluster: Cluster) -> dict[str, Placement]:
    """The placement that samples are moved under, and contiguous beside a base's."""
    in_order = contiguous.solve(model.num_layers, model.num_experts, cluster).placement
    base = None if task.base is None else task.base.placement
    return {"plan": in_order} if base is None else {"plan": base, "contiguous": in_order}


def _next(traffic: Traffic, layer: int, at: Numbers) -> NDArray[np.float64] | None:
    """What the samples really send at the next layer; None after the last."""
    return traffic.copies[at, layer + 1].astype(np.float64) if layer + 1 < traffic.copies.shape[1] else None


def _outcome(totals: Totals, method: str) -> Outcome:
    """The mean over the fitted steps and layers of what was reached, next layers as predicted."""
    value, bound = totals.value / totals.solves, totals.bound / totals.solves
    proven = value <= bound * (1 + ROUNDING)
    bound = value if proven else bound
    return Outcome(
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        objective=Objective(totals.name, value, "min"),
        bound=bound,
        bound_kind="weighted ports" if METHODS[method][0] == "bottleneck" else "transportation",
        gap=relative_gap(value, bound),
        wall_s=totals.wall_s,
        backend=backend_of(METHODS[method][1]),
    )


def _sha256(predictor: Predictor) -> str:
    return hashlib.sha256(predictor.to_bytes()).hexdigest()
