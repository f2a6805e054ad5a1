"""Every metric, interval, gain and verdict of a plan, recounted from its trace."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ...errors import CertificationError, UsageError
from ...profilers.profile import Profile
from ...runtime.plan import Contender, Part, Plan
from ...solvers import contiguous, eplb
from ...traces.count_form import CountTrace
from ...traces.reader import Trace
from .certificate import Certificate
from .count_recount import check_tokens, recount_counts
from .figures import Recounted, gain_interval, interval_of, recounted
from .fitted import Fitted, count_fitted
from .recount import Ledger, Residence, recount
from .roster import Roster, enroll, tokens_of
from .seconds import Clock
from .structure import (
    evaluation_options,
    holders_of,
    labelled,
    placement_options,
    seconds_options,
    slot_widths,
)

__all__ = [
    "check_contender",
    "check_evaluation",
    "check_parts",
    "check_seconds",
    "check_verdict",
    "clock_of",
    "hold",
    "ledgers_of",
    "residences_of",
    "roster_of",
]

CheckPart = Callable[[Part, Roster, str], Mapping[str, Recounted]]


def check_evaluation(
    plan: Plan,
    trace: Trace | CountTrace,
    profile: Profile | None,
    certificate: Certificate,
    on_progress: Callable[[str], None],
) -> Fitted:
    """Hold every figure of the evaluation and the verdict against a recount; returns the fitted counts.

    Parameters
    ----------
    profile
        The plan's; None leaves its seconds unchecked.
    """
    on_progress("recounting the fitted samples")
    roster = roster_of(plan, trace, fit=True)
    fitted = count_fitted(plan, trace, roster)
    residences, clock = residences_of(plan, fitted), clock_of(plan, profile, roster)

    def check_part(part: Part, roster: Roster, name: str) -> dict[str, Recounted]:
        """A recount of every contender of a part, held against its figures."""
        ledgers = ledgers_of(plan, trace, roster, residences, timed=clock is not None)
        if clock is not None:
            clock.outside.clear()
        return {
            label: _check_placed(plan, f"{name}: {label}", ledgers[label], contender, clock, certificate)
            for label, contender in labelled(part).items()
        }

    found = check_parts(plan, trace, roster, check_part, certificate, on_progress)
    check_seconds(plan, clock, certificate)
    check_verdict(plan, found, certificate)
    certificate.unchecked.append("solver seconds, method and backend")
    if placement_options(plan).replanned is not None:
        certificate.unchecked.append("moves from the plan in force and the gain over it")
    if plan.inputs.profile is not None and profile is None:
        certificate.unchecked.append("the profile's hash")
    return fitted


def check_parts(
    plan: Plan,
    trace: Trace | CountTrace,
    fit: Roster,
    check_part: CheckPart,
    certificate: Certificate,
    on_progress: Callable[[str], None],
) -> Mapping[str, Recounted]:
    """Hold both parts of an evaluation against a recount, by `check_part`; returns what the judging part gave."""
    assert plan.evaluation is not None
    _check_header(plan.evaluation.fit, fit, certificate, "fit")
    found, rosters = check_part(plan.evaluation.fit, fit, "fit"), [fit]
    if plan.evaluation.held_out is not None:
        on_progress("recounting the held-out samples")
        roster = roster_of(plan, trace, fit=False)
        _check_header(plan.evaluation.held_out, roster, certificate, "held out")
        found = check_part(plan.evaluation.held_out, roster, "held out")
        rosters.append(roster)
    check_tokens(plan, trace, rosters, certificate)
    certificate.checks.append("metrics of every contender")
    return found


def roster_of(plan: Plan, trace: Trace | CountTrace, *, fit: bool) -> Roster:
    """The fitted or the held-out units, where the plan's options say of them what the trace gives."""
    assert plan.inputs.trace is not None
    split, options = plan.inputs.trace.split, evaluation_options(plan)
    if split.seed != plan.seed:
        raise CertificationError(f"seed {plan.seed} with a split by seed {split.seed}")
    try:
        roster = enroll(
            trace,
            seed=split.seed,
            fraction=split.fit_fraction,
            fit=fit,
            num_devices=plan.cluster.num_devices,
            samples_per_step=options.samples_per_step,
            phases=options.phases,
        )
    except UsageError as error:
        raise CertificationError(f"options.evaluation: {error}") from error
    home = "source_rank" if roster.recorded_home else "ordinal"
    home = "none" if isinstance(trace, CountTrace) else home
    step = "recorded" if roster.step_names is not None else "derived"
    if (options.unit, options.home, options.step) != (roster.kind, home, step):
        raise CertificationError(
            f"options say {options.unit}, {options.home}, {options.step}; the trace gives {roster.kind}, {home}, {step}"
        )
    return roster


def ledgers_of(
    plan: Plan, trace: Trace | CountTrace, roster: Roster, residences: Mapping[str, Residence], *, timed: bool
) -> dict[str, Ledger]:
    """A recount of a part under every residence."""
    if isinstance(trace, CountTrace):
        return recount_counts(trace, roster, residences)
    tokens = tokens_of(trace, roster, evaluation_options(plan).phases)
    return recount(tokens, roster, plan.model.num_layers, residences, timed=timed)


def residences_of(plan: Plan, fitted: Fitted) -> dict[str, Residence]:
    """Where every contender's experts live; baselines are made again from the fitted tokens."""
    assert plan.evaluation is not None
    assert plan.decisions.placement is not None
    decision, num_experts, widths = plan.decisions.placement, plan.model.num_experts, slot_widths(plan)
    slots_D = np.array(widths)
    groups = plan.model.num_expert_groups
    baselines = {
        "contiguous": contiguous.solve(plan.model.num_layers, num_experts, plan.cluster, slots=slots_D).placement,
        "eplb": eplb.solve(fitted.loads, plan.cluster, slots=slots_D, num_groups=groups, method="published").placement,
    }
    residences = {}
    for label, contender in labelled(plan.evaluation.fit).items():
        made = baselines.get(contender.name)
        rows = decision.physical_to_logical if made is None else made.physical_to_logical.tolist()
        residences[label] = Residence(
            coherent=contender.dispatch_model == "coherent",
            nearest=(decision if made is None else made).replica_rule == "nearest",
            holders=holders_of(rows, widths, num_experts),
            num_devices=plan.cluster.num_devices,
            devices_per_node=plan.cluster.devices_per_node,
        )
    return residences


def _check_header(part: Part, roster: Roster, certificate: Certificate, name: str) -> None:
    certificate.agree(f"{name}: tokens", part.num_tokens, roster.num_tokens)
    certificate.agree(f"{name}: samples", part.num_samples, len(roster.ordinal_of))
    certificate.agree(f"{name}: steps", part.num_steps, roster.num_steps)
    certificate.agree(f"{name}: dropped samples", part.dropped_samples, roster.num_dropped)


def clock_of(plan: Plan, profile: Profile | None, roster: Roster) -> Clock | None:
    """What times the recount; None where the plan has no seconds or its profile is not at hand."""
    if "seconds" not in plan.options or (profile is None and plan.inputs.profile is not None):
        return None
    return Clock(plan, profile, samples=roster.kind == "sample")


def _check_placed(
    plan: Plan, label: str, ledger: Ledger, contender: Contender, clock: Clock | None, certificate: Certificate
) -> Recounted:
    """A contender of whole layers, under its dispatch model."""
    coherent = contender.dispatch_model == "coherent"
    seconds = None if clock is None else clock.seconds(ledger, coherent=coherent)
    return check_contender(plan, label, ledger, contender, seconds, certificate)


def check_contender(
    plan: Plan,
    label: str,
    ledger: Ledger,
    contender: Contender,
    seconds: Mapping[str, NDArray[np.float64]] | None,
    certificate: Certificate,
) -> Recounted:
    """Every metric of a contender with its interval; seconds `[Q, B]` by metric, None where nothing times them."""
    found = recounted(plan, ledger, coherent=contender.dispatch_model == "coherent", seconds=seconds or {})
    hold(label, found, contender, certificate, untimed=seconds is None and "seconds" in plan.options)
    return found


def hold(label: str, found: Recounted, contender: Contender, certificate: Certificate, *, untimed: bool) -> None:
    """Refuse a contender whose metrics or intervals are not what was found; `untimed`: its seconds stay unchecked."""
    claimed = {name: metric for name, metric in contender.metrics.items() if not (untimed and name.endswith("_s"))}
    if found.value.keys() != claimed.keys():
        raise CertificationError(f"{label}: metrics {sorted(claimed)}; the recount gives {sorted(found.value)}")
    for name, metric in claimed.items():
        low, high = interval_of(found.draws.get(name))
        certificate.agree(f"{label}: {name}", metric.value, found.value[name])
        certificate.agree(f"{label}: {name} low", metric.low, low)
        certificate.agree(f"{label}: {name} high", metric.high, high)


def check_seconds(plan: Plan, clock: Clock | None, certificate: Certificate) -> None:
    """The curves that the plan names, and how often they were stretched."""
    if "seconds" not in plan.options:
        return
    if clock is None:
        certificate.unchecked.append("predicted seconds (give the plan's profile)")
        return
    clock.check_options(seconds_options(plan), certificate)
    certificate.checks.append("predicted seconds")


def check_verdict(plan: Plan, found: Mapping[str, Recounted], certificate: Certificate) -> None:
    """The gain of the plan, and what it is called."""
    claimed = plan.verdict
    assert claimed is not None
    ours, theirs = found[f"plan/{plan.dispatch_model}"], found[claimed.against]
    low, high = claimed.gain.low, claimed.gain.high
    if claimed.metric in ours.value:
        low, high = gain_interval(claimed.metric, ours, theirs)
        certificate.agree("gain", claimed.gain.value, theirs.value[claimed.metric] - ours.value[claimed.metric])
        certificate.agree("gain low", claimed.gain.low, low)
        certificate.agree("gain high", claimed.gain.high, high)
        certificate.checks.append("verdict")
    else:
        certificate.unchecked.append("the gain of the verdict")
    assert plan.evaluation is not None
    base = labelled(plan.evaluation.judging)[claimed.against].metrics
    least = claimed.at_least * base[claimed.metric].value if claimed.at_least else 0.0
    if (claimed.value == "benefit") != (low is not None and low > least):
        raise CertificationError(f"verdict {claimed.value} with a gain from {low}; a benefit needs one above {least:g}")
