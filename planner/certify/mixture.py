"""A plan of several traces: each counted again, and weighted as the plan says.

Legend: L MoE layers; E experts.
"""

from collections.abc import Callable

import numpy as np

from ...errors import CertificationError, MismatchError, MoeplanError
from ...profilers.profile import Profile
from ...runtime.plan import Part, Plan
from ...traces.count_form import CountTrace, open_any
from ...traces.reader import Trace
from .certificate import Certificate
from .count_recount import check_tokens
from .evaluation import check_seconds, check_verdict, clock_of, hold, ledgers_of, residences_of, roster_of
from .figures import Recounted, recounted, weighted
from .fitted import Fitted, count_fitted
from .roster import Roster
from .seconds import Clock
from .structure import labelled, placement_options

__all__ = ["check_mixture"]

WHOLE = 2**40  # what the loads of a layer add up to
Weighed = list[tuple[float, Trace | CountTrace]]


def check_mixture(
    plan: Plan,
    first: Trace | CountTrace,
    profile: Profile | None,
    certificate: Certificate,
    on_progress: Callable[[str], None],
) -> Fitted | None:
    """Hold the figures of a mixture against recounts; returns its fitted loads, None where a trace is not here."""
    assert plan.evaluation is not None
    traces = _traces(plan, first)
    if traces is None:
        certificate.unchecked.append("figures of a mixture, whose other traces are not here")
        return None
    rosters = [roster_of(plan, one, fit=True) for _, one in traces]
    loads = np.zeros((plan.model.num_layers, plan.model.num_experts), np.int64)
    for (weight, one), roster in zip(traces, rosters, strict=True):
        counted = count_fitted(plan, one, roster).loads
        for layer, row in enumerate(counted):
            loads[layer] += np.rint(weight * WHOLE * row / max(int(row.sum()), 1)).astype(np.int64)
    nothing = np.zeros((plan.model.num_layers - 1, *(plan.model.num_experts,) * 2), np.int64)
    fitted, clock = Fitted(loads, nothing, None), clock_of(plan, profile, rosters[0])
    found: dict[str, Recounted] = {}
    firsts: list[Roster] = []
    for part, fit in ((plan.evaluation.fit, True), (plan.evaluation.held_out, False)):
        if part is None:
            continue
        on_progress(f"recounting the {'fitted' if fit else 'held-out'} part of {len(traces)} traces")
        rosters = [roster_of(plan, one, fit=fit) for _, one in traces]
        firsts.append(rosters[0])
        found = _check_part(plan, part, traces, rosters, fitted, clock, certificate)
    check_tokens(plan, first, firsts, certificate)
    certificate.checks.append("metrics of every contender")
    check_seconds(plan, clock, certificate)
    check_verdict(plan, found, certificate)
    certificate.unchecked.append("solver seconds, method and backend")
    if plan.inputs.profile is not None and profile is None:
        certificate.unchecked.append("the profile's hash")
    return fitted


def _traces(plan: Plan, first: Trace | CountTrace) -> Weighed | None:
    """The traces of a mixture, the others where the plan found them; None where one is gone or was changed."""
    members = placement_options(plan).mixture
    if members[0].sha256 != first.sha256:
        raise MismatchError(f"{first.path}: not the first trace of the mixture; give {members[0].path}")
    if abs(sum(one.weight for one in members) - 1) > 1e-9:
        raise CertificationError(f"a mixture of weights {[one.weight for one in members]}; expected 1 in all")
    found: Weighed = [(members[0].weight, first)]
    for one in members[1:]:
        if "://" in one.path:  # a plan alone must not make anything open a network address
            return None
        try:
            trace = open_any(one.path)
            if trace.sha256 != one.sha256:
                return None
        except MoeplanError:
            return None
        found.append((one.weight, trace))
    return found


def _check_part(
    plan: Plan,
    part: Part,
    traces: Weighed,
    rosters: list[Roster],
    fitted: Fitted,
    clock: Clock | None,
    certificate: Certificate,
) -> dict[str, Recounted]:
    certificate.agree("tokens", part.num_tokens, sum(one.num_tokens for one in rosters))
    certificate.agree("samples", part.num_samples, sum(len(one.ordinal_of) for one in rosters))
    certificate.agree("steps", part.num_steps, sum(one.num_steps for one in rosters))
    certificate.agree("dropped samples", part.dropped_samples, sum(one.num_dropped for one in rosters))
    residences, found = residences_of(plan, fitted), dict[str, list[tuple[float, Recounted]]]()
    if clock is not None:
        clock.outside.clear()
    for (weight, trace), roster in zip(traces, rosters, strict=True):
        for label, ledger in ledgers_of(plan, trace, roster, residences, timed=clock is not None).items():
            coherent = residences[label].coherent
            seconds = {} if clock is None else clock.seconds(ledger, coherent=coherent)
            figures = recounted(plan, ledger, coherent=coherent, seconds=seconds)
            found.setdefault(label, []).append((weight, figures))
    whole = {label: weighted(one) for label, one in found.items()}
    untimed = clock is None and "seconds" in plan.options
    for label, contender in labelled(part).items():
        hold(label, whole[label], contender, certificate, untimed=untimed)
    return whole
