"""A task: what a strategy is given, its request with the trace, the base and what is read of them once.

Legend: U units; B steps; L MoE layers; E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, MismatchError
from ..profilers.profile import Profile
from ..profilers.profile import load as load_profile
from ..runtime.decisions import DispatchModel
from ..runtime.plan import Plan
from ..solvers import contiguous
from ..solvers.placement import Placement, slots_for
from ..traces.count_form import CountTrace, open_any
from ..traces.model import ModelSpec
from ..traces.reader import Trace
from .measures.speeds import Speeds
from .measures.step_loads import step_loads
from .measures.survey import Cohort, Survey, survey
from .options import EvaluationOptions
from .request import Request

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """A request, checked; what is read of its files is read when it is first asked for, and once.

    Parameters
    ----------
    base, previous
        The plans of `--on` and of `--from`, for this cluster and, once the trace is open, for its model.
    dispatch_model, method
        As asked for, else the strategy's own; no method where the strategy has only one.
    say
        Told what begins, in a few words.
    """

    request: Request
    base: Plan | None
    dispatch_model: DispatchModel
    method: str | None
    say: Callable[[str], None] = lambda _: None
    previous: Plan | None = None

    @cached_property
    def source(self) -> Trace | CountTrace:
        """The trace, of either form.

        Raises
        ------
        InputError
            It is damaged.
        MismatchError
            It is of another model than the base or the plan in force.
        """
        found = open_any(self.request.trace)
        if self.base is not None:
            _check_model(self.request.on, self.base.model, found)
        if self.previous is not None:
            _check_model(self.request.previous, self.previous.model, found, unknown=True)
        return found

    @property
    def trace(self) -> Trace:
        """The trace, refused in count form."""
        if isinstance(self.source, CountTrace):
            raise InputError(
                f"{self.source.path}: counts alone; {self.request.strategy} needs tokens: give the trace that they were"
                " counted from, or balance these loads with --strategy eplb"
            )
        if self.dispatch_model == "coherent":
            self.source.check_first_choices("coherent dispatch")
        return self.source

    @property
    def model(self) -> ModelSpec:
        """The model of the trace."""
        return self.source.meta.model

    @cached_property
    def surveyed(self) -> Survey:
        """The units of the trace."""
        self.say("reading the trace")
        return survey(self.source, phases=self.request.phases or None)

    @cached_property
    def fitted(self) -> NDArray[np.bool_]:
        """Whether each unit is fitted, `[U]`; some are, and unless all were asked for some are held out."""
        surveyed, request = self.surveyed, self.request
        fitted_U = surveyed.fitted(seed=request.seed, fraction=request.fit_fraction)
        if not fitted_U.any() or (request.fit_fraction < 1 and fitted_U.all()):
            raise InputError(
                f"{self.source.path}: {len(fitted_U)} {surveyed.kind}s split into {fitted_U.sum()} to fit and"
                f" {(~fitted_U).sum()} held out; expected some of both. Record more, or give --fit-fraction 1"
            )
        return fitted_U

    @property
    def cohorts(self) -> list[Cohort]:
        """The fitted units as they run, then those held out where there are any."""
        devices, samples = self.request.cluster.num_devices, self.request.step_samples
        masks = [self.fitted] if self.fitted.all() else [self.fitted, ~self.fitted]
        return [self.surveyed.cohort(mask_U, num_devices=devices, samples_per_step=samples) for mask_U in masks]

    @cached_property
    def fitted_steps(self) -> NDArray[np.int64]:
        """The loads of experts in every complete step of the fitted units, `[B, L, E]`; errors as of `step_loads`."""
        return step_loads(self.source, self.cohorts[:1], phases=self.request.phases or None)[0]

    @cached_property
    def profile(self) -> Profile | None:
        """The profile; None without."""
        return None if self.request.profile is None else load_profile(self.request.profile)

    @cached_property
    def speeds(self) -> Speeds | None:
        """What times the parts of a step; None without a profile and without links."""
        has_samples = self.surveyed.kind == "sample"
        found = Speeds.of(self.profile, self.request.cluster, self.model, samples=has_samples)
        return found.of_loads() if found is not None and isinstance(self.source, CountTrace) else found

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slots of every device as asked for, else as many as in the plan in force, none on dead ones, `[D]`."""
        request, before = self.request, None if self.previous is None else self.previous.placement
        asked = before.slots if before and request.slots is None and not request.redundant else request.slots
        redundant = 0 if request.redundant == "auto" else request.redundant
        if not request.dead:
            return slots_for(self.model.num_experts, request.cluster.num_devices, asked, redundant=redundant)
        slots_D = np.zeros(request.cluster.num_devices, np.int64)
        slots_D[request.alive] = slots_for(self.model.num_experts, len(request.alive), asked, redundant=redundant)
        return slots_D

    @property
    def placement(self) -> Placement:
        """The base's placement, contiguous without one."""
        if self.base is not None and self.base.placement is not None:
            return self.base.placement
        model, cluster = self.model, self.request.cluster
        slots_D = slots_for(model.num_experts, cluster.num_devices, None, redundant=0)
        return contiguous.solve(model.num_layers, model.num_experts, cluster, slots=slots_D).placement

    @property
    def evaluation_options(self) -> EvaluationOptions:
        """How a plan of this task is judged."""
        surveyed, request = self.surveyed, self.request
        home: Literal["source_rank", "ordinal"] = "ordinal"
        if surveyed.num_source_ranks == request.cluster.num_devices:
            home = "source_rank"
        return EvaluationOptions(
            unit=surveyed.kind,
            phases=request.phases,
            samples_per_step=request.step_samples,
            home="none" if isinstance(self.source, CountTrace) else home,
            step="derived" if surveyed.steps is None else "recorded",
        )


def _check_model(path: object, planned: ModelSpec, trace: Trace | CountTrace, *, unknown: bool = False) -> None:
    """Refuse a trace of another model than a plan's; with `unknown`, sizes that only one of them knows may differ."""
    ours, theirs = _flat(planned), _flat(trace.meta.model)
    differing = [
        name for name in ours if ours[name] != theirs[name] and not (unknown and None in (ours[name], theirs[name]))
    ]
    if differing:
        raise MismatchError(
            f"{path}: a plan for {_worded(ours, differing)}, {trace.path} has {_worded(theirs, differing)}; expected"
            " the same model: give the plan's own trace, or solve on this one"
        )


def _flat(model: ModelSpec) -> dict[str, Any]:
    """Every field of a model and of its attention."""
    flat = asdict(model)
    return {name: value for name, value in flat.items() if name != "attention"} | asdict(model.attention)


def _worded(values: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {'unknown' if values[name] is None else values[name]!s:.40}" for name in names)
