"""From a trace and a cluster to a Plan: survey, count, place, evaluate, judge."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, UsageError
from ..files import sha256_file
from ..profilers.profile import load as load_profile
from ..runtime.plan import (
    Decisions,
    DispatchModel,
    FileInput,
    Inputs,
    PlacementDecision,
    Plan,
    Split,
    TraceInput,
)
from ..solvers.placement import slots_for
from ..solvers.result import PlacementResult
from ..traces.counts import Counts, count
from ..traces.reader import Trace, open_trace
from .evaluate import Evaluated, evaluate, verdict
from .options import EvaluationOptions, PlacementOptions, SecondsOptions
from .request import Request
from .speeds import Speeds
from .strategy import STRATEGIES, Strategy, strategy
from .survey import Survey, survey
from .tally import Route

__all__ = ["solve"]


def solve(request: Request, *, on_progress: Callable[[str], None] = lambda _: None) -> Plan:
    """The plan for a request.

    Parameters
    ----------
    on_progress
        Told what begins, in a few words.

    Raises
    ------
    UsageError
        The request cannot be met on this cluster.
    InputError
        The trace is damaged, or lacks what the strategy needs.
    """
    chosen = strategy(request.strategy)
    dispatch_model = _dispatch_model(chosen, request)
    trace = open_trace(request.trace)
    slots_D = slots_for(
        trace.model.num_experts, request.cluster.num_devices, request.slots, redundant=request.redundant
    )
    on_progress("reading the trace")
    surveyed = survey(trace, phases=request.phases or None)
    fitted_U = _fitted(trace, surveyed, request)
    counts = _count(trace, surveyed.unit_ids[fitted_U], request)
    if not counts.loads.any():
        raise InputError(f"{trace.path}: no token of the fitted samples is routed; there is nothing to place by")
    on_progress(f"solving {chosen.name}")
    placed = chosen.place(counts, request, slots_D)
    on_progress("replaying the trace under the plan and its baselines")
    routes = _routes(placed, dispatch_model, counts, request, slots_D)
    speeds = _speeds(trace, surveyed, request)
    evaluated = evaluate(
        trace,
        surveyed,
        fitted_U,
        routes,
        request.cluster,
        seed=request.seed,
        samples_per_step=request.step_samples,
        phases=request.phases or None,
        speeds=speeds,
    )
    return Plan.make(
        strategies=(chosen.name,),
        seed=request.seed,
        cluster=request.cluster,
        model=trace.model,
        inputs=_inputs(trace, request),
        decisions=Decisions(placement=PlacementDecision.of(placed.placement, repaired=placed.repaired)),
        options=_options(request, dispatch_model, surveyed) | _seconds_options(speeds, evaluated),
        outcome={"placement": placed.outcome},
        evaluation=evaluated.evaluation,
        verdict=verdict(evaluated, chosen.metric, "contiguous/standard"),
    )


def _dispatch_model(chosen: Strategy, request: Request) -> DispatchModel:
    model = request.dispatch_model or chosen.dispatch_models[0]
    if model not in chosen.dispatch_models:
        raise UsageError(
            f"--dispatch {model} with --strategy {chosen.name}; expected {' or '.join(chosen.dispatch_models)}"
        )
    return model


def _fitted(trace: Trace, surveyed: Survey, request: Request) -> NDArray[np.bool_]:
    """Whether each unit is fitted, `[U]`; some are, and unless all were asked for some are held out."""
    fitted_U = surveyed.fitted(seed=request.seed, fraction=request.fit_fraction)
    if not fitted_U.any() or (request.fit_fraction < 1 and fitted_U.all()):
        raise InputError(
            f"{trace.path}: {len(fitted_U)} {surveyed.kind}s split into {fitted_U.sum()} to fit and"
            f" {(~fitted_U).sum()} held out; expected some of both. Record more, or give --fit-fraction 1"
        )
    return fitted_U


def _count(trace: Trace, fitted_ids: NDArray[np.int64], request: Request) -> Counts:
    """The counts of the fitted units."""

    def is_fitted(units: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(units, fitted_ids)

    return count(trace, keep=is_fitted, phases=request.phases or None)


def _routes(
    placed: PlacementResult, dispatch_model: DispatchModel, counts: Counts, request: Request, slots_D: NDArray[np.int64]
) -> list[Route]:
    """The plan, then the baselines with the same slots."""
    contiguous = STRATEGIES["contiguous"].place(counts, request, slots_D).placement
    eplb = STRATEGIES["eplb"].place(counts, request, slots_D).placement
    routes = [Route("plan", dispatch_model, placed.placement), Route("contiguous", "standard", contiguous)]
    if dispatch_model == "coherent":  # tell coherence and placement apart
        routes += [Route("contiguous", "coherent", contiguous), Route("plan", "standard", placed.placement)]
    return [*routes, Route("eplb", "standard", eplb)]


def _speeds(trace: Trace, surveyed: Survey, request: Request) -> Speeds | None:
    profile = None if request.profile is None else load_profile(request.profile)
    return Speeds.of(profile, request.cluster, trace.model, samples=surveyed.kind == "sample")


def _seconds_options(speeds: Speeds | None, evaluated: Evaluated) -> dict[str, dict[str, Any]]:
    if speeds is None:
        return {}
    seconds = SecondsOptions(
        sources=speeds.sources,
        missing=speeds.missing,
        extrapolated=evaluated.extrapolated,
        other_dtype=speeds.other_dtype,
    )
    return {"seconds": seconds.model_dump(mode="json")}


def _inputs(trace: Trace, request: Request) -> Inputs:
    split = Split(fit_fraction=request.fit_fraction, seed=request.seed)
    source = TraceInput(path=str(trace.path), sha256=trace.sha256, num_tokens=trace.num_tokens, split=split)
    if request.profile is None:
        return Inputs(trace=source)
    return Inputs(trace=source, profile=FileInput(path=str(request.profile), sha256=sha256_file(request.profile)))


def _options(request: Request, dispatch_model: DispatchModel, surveyed: Survey) -> dict[str, dict[str, Any]]:
    placement = PlacementOptions(
        strategy=request.strategy,
        dispatch_model=dispatch_model,
        method=request.method,
        backend=request.backend,
        time_limit_s=request.time_limit_s,
    )
    evaluation = EvaluationOptions(
        unit=surveyed.kind,
        phases=request.phases,
        samples_per_step=request.step_samples,
        home="source_rank" if surveyed.num_source_ranks == request.cluster.num_devices else "ordinal",
        step="derived" if surveyed.steps is None else "recorded",
    )
    return {"placement": placement.model_dump(mode="json"), "evaluation": evaluation.model_dump(mode="json")}
