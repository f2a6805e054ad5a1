"""The pipeline degrees of a plan and all that is said of them, recomputed from its trace and its profile."""

from collections.abc import Callable

import numpy as np

from ...errors import CertificationError
from ...profilers.profile import Profile
from ...runtime.decisions import PipelineDecision
from ...runtime.plan import Part, Plan
from ...solvers import contiguous
from ...traces.reader import Trace
from ...traces.schema import PHASES
from ..options import PipelineOptions
from .certificate import Certificate
from .degrees import check_degrees, cut_of, schedule_of
from .dropped import Buffers
from .evaluation import (
    check_contender,
    check_parts,
    check_seconds,
    check_verdict,
    clock_of,
    roster_of,
)
from .figures import Recounted
from .fitted import Fitted, count_fitted
from .recount import Ledger, Residence, recount
from .roster import Roster, tokens_of
from .seconds import Clock
from .structure import evaluation_options, holders_of, labelled, pipeline_options, slot_widths

__all__ = ["check_pipeline"]

BACKWARD = 2.0
LARGEST_SEARCHED = 1_024


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

    def ledger_of(roster: Roster) -> Ledger:
        tokens = tokens_of(trace, roster, evaluation_options(plan).phases)
        timed = clock is not None
        return recount(tokens, roster, plan.model.num_layers, {"plan": residence}, timed=timed)["plan"]

    def check_part(part: Part, of: Roster, name: str) -> dict[str, Recounted]:
        ledger = fitted_ledger if of is roster else ledger_of(of)
        if decision.capacity_factor is not None:
            part = _check_dropped(plan, part, of, trace, certificate, name)
        return _check_part(plan, part, ledger, clock, certificate, name)

    fitted_ledger = ledger_of(roster)
    if clock is None:
        certificate.unchecked.append("degrees, their objective and their bound")
    else:
        on_progress("timing every degree")
        check_degrees(plan, options, schedule_of(plan, fitted_ledger, clock), certificate)
    found = check_parts(plan, trace, roster, check_part, certificate, on_progress)
    check_seconds(plan, clock, certificate)
    check_verdict(plan, found, certificate)
    if clock is not None:
        timing = {source.removeprefix("link ") for source in clock.sources.values()}
        certificate.unchecked += [
            f"link {kind}, which times nothing" for kind in sorted({*plan.cluster.links} - timing)
        ]
    certificate.unchecked += ["solver seconds", "that the degrees of paper are those of its algorithm"]
    if decision.shares is not None:
        certificate.unchecked.append("that no other shares of chunks take fewer seconds")
    return count_fitted(plan, trace, roster)


def _check_shape(plan: Plan, trace: Trace, options: PipelineOptions, decision: PipelineDecision) -> None:
    """Degrees as many as layers and no higher than allowed; a backward pass where the tokens are of training."""
    if options.max_degree > LARGEST_SEARCHED:
        raise CertificationError(
            f"options.pipeline.max_degree: {options.max_degree}; expected at most {LARGEST_SEARCHED:,}"
        )
    for name, one in {"plan": decision, **options.baselines}.items():
        passes = [one.forward, *([] if one.backward is None else [one.backward])]
        if any(len(degrees) != plan.model.num_layers or max(degrees) > options.max_degree for degrees in passes):
            raise CertificationError(f"degrees of {name}: not one a layer, or above {options.max_degree}")
        if (one.backward is None) != (options.backward == 0) or (
            options.joint and one.backward not in (None, one.forward)
        ):
            raise CertificationError(f"degrees of {name}: passes other than options.pipeline says")
        cut_of(plan, options, name)  # passes that cut each other unevenly have none
        uneven = name == "plan" and options.method == "unequal"
        if uneven and options.joint:
            raise CertificationError("degrees of plan: method unequal with joint, which is for equal chunks")
        if (one.shares is not None) != uneven or one.capacity_factor != decision.capacity_factor:
            raise CertificationError(f"degrees of {name}: shares or a capacity other than method {options.method} has")
    expected = {contender.name for contender in plan.evaluation.fit.contenders} - {"plan"} if plan.evaluation else set()
    if {*options.baselines} != expected:
        raise CertificationError(f"degrees of {sorted(options.baselines)}; the contenders are {sorted(expected)}")
    training = PHASES.index("train")
    phases = evaluation_options(plan).phases or None
    trains = all(bool((batch.phase == training).all()) for batch in trace.batches((), phases=phases))
    if options.backward != (BACKWARD if trains else 0.0):
        raise CertificationError(f"a backward pass of factor {options.backward}; training tokens: {trains}")
    experts, devices = plan.model.num_experts, plan.cluster.num_devices
    if decision.capacity_factor is not None and any(width * devices != experts for width in slot_widths(plan)):
        raise CertificationError("a fixed capacity without every expert once and as many on every device")
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


def _check_dropped(plan: Plan, part: Part, roster: Roster, trace: Trace, certificate: Certificate, name: str) -> Part:
    """Hold what every contender drops against a recount; returns the part without it."""
    options, decision, kept = pipeline_options(plan), plan.decisions.pipeline, []
    assert decision is not None
    assert decision.capacity_factor is not None
    buffers = Buffers(plan, roster, tokens_of(trace, roster, evaluation_options(plan).phases))
    for contender in part.contenders:
        label, claimed = f"{name}: {contender.label}: dropped_share", dict(contender.metrics)
        if (dropped := claimed.pop("dropped_share", None)) is None:
            raise CertificationError(f"{label} is not there; expected it of a fixed capacity")
        forward, _ = cut_of(plan, options, contender.name)
        certificate.agree(label, dropped.value, buffers.dropped_share(decision.capacity_factor, forward))
        certificate.agree(f"{label} low", dropped.low, None)
        certificate.agree(f"{label} high", dropped.high, None)
        kept.append(contender.model_copy(update={"metrics": claimed}))
    return part.model_copy(update={"contenders": tuple(kept)})


def _check_part(
    plan: Plan,
    part: Part,
    ledger: Ledger,
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
            timed = schedule_of(plan, ledger, clock).timed(*cut_of(plan, options, contender.name))
            seconds = timed.seconds
            for metric, share in timed.outside.items():
                clock.outside.setdefault(metric, []).append(share)
        found[label] = check_contender(plan, f"{name}: {label}", ledger, contender, seconds, certificate)
    return found
