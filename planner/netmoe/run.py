"""A run of a trace's samples: counted and split, re-homed online by every contender, and timed.

Legend: I samples; L MoE layers; B steps; D devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...profilers.cluster import Cluster
from ...runtime.decisions import DispatchModel
from ...runtime.migrating.predictor import Predictor
from ...solvers import contiguous, netmoe
from ...solvers.placement import Placement
from ...solvers.seconds import total
from ...traces.model import ModelSpec
from ..evaluate import Replayed
from ..measures.predicted import SOURCES, Predicted, predicted
from ..measures.speeds import Speeds
from ..measures.survey import Cohort
from ..options import EvaluationOptions
from ..task import Task
from .counted import Counted, SampleTraffic, count_samples
from .online import Homes, Movers, Totals, deal, rehome, steps_of
from .predictor import fit_predictor
from .roll import Roll, call_roll
from .tallied import tallied

__all__ = ["EXCHANGE", "Run"]

EXCHANGE = "exchange_s"  # dispatch and combine
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
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
    def of(cls, task: Task) -> "Run":
        """The run of a task: its trace counted under the base's placement and in order, the predictors fitted."""
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

    def locality(self) -> netmoe.Locality:
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
        return netmoe.Locality(blind / cohort.num_steps, least / cohort.num_steps)

    def timed_s(self, method: str) -> float:
        """Seconds of the timed parts of a fitted step under a method."""
        tried, _ = replace(self, method=method).contender("plan", "migrating", self.parts[0], bounded=False)
        seconds = tried.predicted.seconds
        return float(sum(seconds[part].seconds.mean() for part in SOURCES if part in seconds))

    def row(self, place: Numbers) -> list[tuple[Replayed, Homes]]:
        """Every contender on the samples at these places; bounded is the plan on the fitted ones."""
        fitted = place is self.parts[0]
        return [
            self.contender(name, model, place, bounded=fitted and name == "plan") for name, model in self.contenders
        ]

    @property
    def contenders(self) -> list[tuple[str, DispatchModel]]:
        """Name and dispatch model of the contenders, the plan first.

        `base` and `contiguous` are placements; under one of them "migrating" is the policy fitted there, "standard"
        leaves samples where they are, `dealt` where their lengths put them before the first layer. The oracle is the
        plan that knows the next layer, `unpredicted` the plan that does not look at it, as "paper" never does.
        """
        found: list[tuple[str, DispatchModel]] = [("plan", "migrating"), ("oracle", "migrating")]
        if self.predictors:
            found.append(("unpredicted", "migrating"))
        if self.has_base:
            found += [("base", "standard"), ("contiguous", "migrating")]
        return [*found, ("dealt", "standard"), ("contiguous", "standard")]

    def judged_by(self, task: Task) -> EvaluationOptions:
        """How the plan is judged."""
        return EvaluationOptions(
            unit=self.roll.unit,
            phases=task.request.phases,
            samples_per_step=self.samples_per_step,
            home="source_rank" if self.roll.recorded_home(self.cluster.num_devices) else "ordinal",
            step="derived" if self.roll.step is None else "recorded",
        )

    def contender(
        self, name: str, dispatch_model: DispatchModel, place: Numbers, *, bounded: bool
    ) -> tuple[Replayed, Homes]:
        """One of the `contenders` on the samples at these places, and where it puts them."""
        traffic = self.counted.traffic["contiguous" if name == "contiguous" and self.has_base else "plan"]
        cohort = self.cohort(place)
        homes = self._homes(name, dispatch_model, traffic, place, cohort, bounded=bounded)
        tally = tallied(self.roll, traffic, place, cohort, homes.device, self.cluster)
        seconds = Predicted({}, {})
        if self.speeds is not None:
            seconds = predicted(tally, self.speeds, self.cluster, self.model, dispatch_model)
            if self.speeds.exchange:
                parts = seconds.seconds
                parts[EXCHANGE] = total([parts["dispatch_s"], parts["combine_s"]])
        return Replayed(name, dispatch_model, tally, seconds), homes

    def _homes(
        self,
        name: str,
        dispatch_model: DispatchModel,
        traffic: SampleTraffic,
        place: Numbers,
        cohort: Cohort,
        *,
        bounded: bool,
    ) -> Homes:
        assert cohort.home is not None
        assert cohort.step is not None
        if dispatch_model == "standard":
            home_I = cohort.home
            if name == "dealt":
                home_I = deal(self.roll.tokens[place], home_I, cohort.step, self.cluster.num_devices)
            return Homes(np.tile(home_I, (self.model.num_layers + 1, 1)), Totals())
        predictor = self.predictors.get("contiguous" if name == "contiguous" else "plan")

        def predict(layer: int, at: Numbers) -> NDArray[np.float64] | None:
            if name == "oracle":
                return _next(traffic, layer, at)
            if predictor is None or name == "unpredicted":
                return None
            return predictor.copies(layer, self.counted.experts[at, layer])

        movers = Movers(traffic, place, cohort.home, cohort.step)
        copy_bytes = self.model.copy_bytes
        return rehome(self.method, movers, self.cluster, predict=predict, copy_bytes=copy_bytes, bounded=bounded)


def _placements(task: Task, model: ModelSpec, cluster: Cluster) -> dict[str, Placement]:
    """The placement that samples are moved under, and contiguous beside a base's."""
    in_order = contiguous.solve(model.num_layers, model.num_experts, cluster).placement
    base = None if task.base is None else task.base.placement
    return {"plan": in_order} if base is None else {"plan": base, "contiguous": in_order}


def _next(traffic: SampleTraffic, layer: int, at: Numbers) -> NDArray[np.float64] | None:
    """What the samples really send at the next layer; None after the last."""
    return traffic.copies[at, layer + 1].astype(np.float64) if layer + 1 < traffic.copies.shape[1] else None
