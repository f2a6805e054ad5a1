"""The pipeline degrees of a plan and all that is said of them, recomputed from its trace and its profile.

Legend: R degrees; L MoE layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError
from ...profilers.profile import Profile
from ...runtime.decisions import PipelineDecision
from ...runtime.plan import Part, Plan
from ...solvers import contiguous
from ...traces.reader import Trace
from ...traces.schema import PHASES
from ..options import PipelineOptions, StageSeconds
from .certificate import TOLERANCE, Certificate
from .evaluation import (
    Fitted,
    check_contender,
    check_parts,
    check_seconds,
    check_verdict,
    clock_of,
    count_fitted,
    roster_of,
)
from .figures import Recounted, middle
from .recount import Ledger, Residence, recount
from .roster import Roster, tokens_of
from .schedule import Schedule
from .seconds import Clock
from .structure import evaluation_options, holders_of, labelled, pipeline_options, slot_widths

__all__ = ["check_pipeline"]

TUTEL_HIGHEST = 32
BACKWARD = 2.0


def check_pipeline(
    plan: Plan,
    trace: Trace,
    profile: Profile | None,
    certificate: Certificate,
    on_progress: Callable[[str], None],
) -> Fitted:
    """Hold degrees, objective, bound, every figure and the verdict against a recount; returns the fitted counts.

    Parameters
    ----------
    profile
        The plan's; None leaves seconds and all that follows from them unchecked.
    """
    options, decision = pipeline_options(plan), plan.decisions.pipeline
    assert decision is not None
    _check_shape(plan, trace, options, decision)
    on_progress("recounting the fitted samples")
    roster = roster_of(plan, trace, fit=True)
    clock, residence = clock_of(plan, profile, roster), _residence(plan)
    degrees = {"plan": decision, **options.baselines}

    def ledger_of(roster: Roster) -> Ledger:
        tokens = tokens_of(trace, roster, evaluation_options(plan).phases)
        timed = clock is not None
        return recount(tokens, roster, plan.model.num_layers, {"plan": residence}, timed=timed)["plan"]

    def check_part(part: Part, of: Roster, name: str) -> dict[str, Recounted]:
        ledger = fitted_ledger if of is roster else ledger_of(of)
        return _check_part(plan, part, ledger, degrees, clock, certificate, name)

    fitted_ledger = ledger_of(roster)
    if clock is None:
        certificate.unchecked.append("degrees, their objective and their bound")
    else:
        on_progress("timing every degree")
        _check_degrees(
            plan, options, Schedule(fitted_ledger, clock, options.backward, options.full_duplex), certificate
        )
    found = check_parts(plan, trace, roster, check_part, certificate, on_progress)
    check_seconds(plan, clock, certificate)
    check_verdict(plan, found, certificate)
    certificate.unchecked += ["solver seconds", "that the degrees of paper and robust are those of their algorithms"]
    return count_fitted(plan, trace, roster)


def _check_shape(plan: Plan, trace: Trace, options: PipelineOptions, decision: PipelineDecision) -> None:
    """Degrees as many as layers and no higher than allowed; a backward pass where the tokens are of training."""
    for name, one in {"plan": decision, **options.baselines}.items():
        passes = [one.forward, *([] if one.backward is None else [one.backward])]
        if any(len(degrees) != plan.model.num_layers or max(degrees) > options.max_degree for degrees in passes):
            raise CertificationError(f"degrees of {name}: not one a layer, or above {options.max_degree}")
        if (one.backward is None) != (options.backward == 0) or (
            options.joint and one.backward not in (None, one.forward)
        ):
            raise CertificationError(f"degrees of {name}: passes other than options.pipeline says")
    expected = {contender.name for contender in plan.evaluation.fit.contenders} - {"plan"} if plan.evaluation else set()
    if {*options.baselines} != expected:
        raise CertificationError(f"degrees of {sorted(options.baselines)}; the contenders are {sorted(expected)}")
    training = PHASES.index("train")
    phases = evaluation_options(plan).phases or None
    trains = all(bool((batch.phase == training).all()) for batch in trace.batches((), phases=phases))
    if options.backward != (BACKWARD if trains else 0.0):
        raise CertificationError(f"a backward pass of factor {options.backward}; training tokens: {trains}")
    if options.placement != ("contiguous" if plan.decisions.placement is None else "base"):
        raise CertificationError(f"degrees under placement {options.placement!r}, which is not the plan's")


def _residence(plan: Plan) -> Residence:
    """Where experts live: as the plan says, else contiguous, whose solver is what it is."""
    widths, decision, cluster = slot_widths(plan), plan.decisions.placement, plan.cluster
    num_layers, num_experts = plan.model.num_layers, plan.model.num_experts
    made = contiguous.solve(num_layers, num_experts, cluster, slots=np.array(widths)).placement
    rows = made.physical_to_logical.tolist() if decision is None else decision.physical_to_logical
    return Residence(
        coherent=False,
        nearest=(made if decision is None else decision).replica_rule == "nearest",
        holders=holders_of(rows, widths, num_experts),
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
    )


def _check_part(
    plan: Plan,
    part: Part,
    ledger: Ledger,
    degrees: Mapping[str, PipelineDecision],
    clock: Clock | None,
    certificate: Certificate,
    name: str,
) -> dict[str, Recounted]:
    """Every contender at its degrees; what was outside the sizes measured is left in the clock."""
    options, found = pipeline_options(plan), {}
    if clock is not None:
        clock.layers(ledger, coherent=False)  # names the curves
        clock.outside.clear()
    for label, contender in labelled(part).items():
        seconds = None
        if clock is not None:
            one = degrees[contender.name]
            timed = Schedule(ledger, clock, options.backward, options.full_duplex).timed(one.forward, one.backward)
            seconds = timed.seconds
            for metric, share in timed.outside.items():
                clock.outside.setdefault(metric, []).append(share)
        found[label] = check_contender(plan, f"{name}: {label}", ledger, contender, seconds, certificate)
    return found


@dataclass(frozen=True, slots=True)
class _Costs:
    """Mean seconds of every layer at every degree, `[R, L]`, forward, backward and both."""

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]

    @property
    def both(self) -> NDArray[np.float64]:
        return self.forward + self.backward

    def of(self, one: PipelineDecision) -> float:
        """Of a step at these degrees."""
        back = one.forward if one.backward is None else one.backward
        rows = zip(one.forward, back, strict=True)
        return float(sum(self.forward[f - 1, x] + self.backward[b - 1, x] for x, (f, b) in enumerate(rows)))


def _check_degrees(plan: Plan, options: PipelineOptions, fitted: Schedule, certificate: Certificate) -> None:
    """Degrees that claim to be best are; the objective and the bound are theirs; stages take what is said."""
    decision, outcome = plan.decisions.pipeline, plan.outcome["pipeline"]
    assert decision is not None
    costs = _costs(plan, options, fitted)
    passes = [costs.both] if options.joint else [costs.forward, costs.backward]
    least = float(sum(table.min(axis=0).sum() for table in passes))
    goal = (outcome.objective.name, outcome.objective.sense, outcome.bound_kind)
    if goal != ("moe_s", "min", "full search"):
        raise CertificationError(f"objective and bound {goal}; expected the least moe_s by a full search")
    certificate.agree("objective", outcome.objective.value, costs.of(decision))
    certificate.agree("bound", outcome.bound, least)
    claims = {"plan": decision, **options.baselines}
    _check_best("exact", claims["plan" if options.method == "exact" else "exact"], costs, least)
    _check_best("one_degree", claims["one_degree"], costs, float(costs.both.sum(axis=1).min()))
    for name, allowed in (("degree_1", {1}), ("one_degree", {*range(1, options.max_degree + 1)})):
        found = {*claims[name].forward, *(claims[name].backward or ())}
        if len(found) > 1 or not found <= allowed:
            raise CertificationError(f"degrees of {name}: {sorted(found)}")
    _check_tutel(plan, options, costs.both)
    _check_stages(plan, options, fitted, certificate)
    certificate.checks += ["degrees", "objective of pipeline", "bound of pipeline"]


def _check_tutel(plan: Plan, options: PipelineOptions, both: NDArray[np.float64]) -> None:
    """What Tutel takes is the best of what it takes."""
    degrees, most = options.a2a_ffn_overlap_degree, min(TUTEL_HIGHEST, options.max_degree)
    if len(degrees) != plan.model.num_layers or max(degrees) > most:
        raise CertificationError(f"a2a_ffn_overlap_degree: not one a layer, or above {most}")
    one = PipelineDecision(forward=degrees, backward=None)
    least = float(both[:most].min(axis=0).sum())
    _check_best("a2a_ffn_overlap_degree", one, _Costs(both, np.zeros_like(both)), least)


def _costs(plan: Plan, options: PipelineOptions, fitted: Schedule) -> _Costs:
    def table(*, back: bool) -> NDArray[np.float64]:
        every = ((degree,) * plan.model.num_layers for degree in range(1, options.max_degree + 1))
        return np.array([middle(fitted.taken(degrees, back=back)).mean(axis=0) for degrees in every])

    forward = table(back=False)
    return _Costs(forward, table(back=True) if options.backward else np.zeros_like(forward))


def _check_best(name: str, one: PipelineDecision, costs: _Costs, least: float) -> None:
    if costs.of(one) > least * (1 + TOLERANCE):
        raise CertificationError(f"degrees of {name}: others take fewer seconds, {least:.9g}")


def _check_stages(plan: Plan, options: PipelineOptions, fitted: Schedule, certificate: Certificate) -> None:
    """The stages of a chunk, which a timeline draws."""
    decision = plan.decisions.pipeline
    assert decision is not None
    claims: list[tuple[StageSeconds | None, tuple[int, ...] | None, float]] = [
        (options.whole, (1,) * plan.model.num_layers, 1.0),
        (options.forward, decision.forward, 1.0),
        (options.backward_pass, decision.backward, options.backward),
    ]
    for claimed, degrees, factor in claims:
        if (claimed is None) != (degrees is None):
            raise CertificationError("options.pipeline: stages of a pass that the plan does not decide")
        if claimed is None or degrees is None:
            continue
        for (name, column), levels in zip(claimed, fitted.stages(degrees), strict=True):
            scale = factor if name == "experts_s" else 1.0
            found = scale * middle(levels).mean(axis=0)
            if len(column) != len(found):
                raise CertificationError(f"options.pipeline: {name} of {len(column)} layers")
            for layer, (one, other) in enumerate(zip(column, found.tolist(), strict=True)):
                certificate.agree(f"{name} of layer {layer}", one, other)
