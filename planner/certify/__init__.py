"""Certification: everything a plan claims, recomputed by other code than made it.

The placement rules are read off the plan's own lists, the trace is recounted, and shares, intervals, gain, verdict,
objective and bound are computed again. Only the baselines' placements come from their solvers: a baseline *is* that
algorithm's output. What is not recomputed is listed in the certificate.
"""

import os
from collections.abc import Callable

from ...errors import CertificationError, MismatchError, MoeplanError
from ...files import sha256_file, size_of
from ...profilers.profile import MAX_PROFILE_BYTES, Profile
from ...profilers.profile import load as load_profile
from ...runtime.plan import Plan
from ...traces.reader import open_trace
from .certificate import Certificate
from .evaluation import check_evaluation
from .outcome import check_outcome
from .structure import check_structure

__all__ = ["Certificate", "certifiable_profile", "certifiable_trace", "certify"]


def certify(
    plan: Plan,
    trace: str | os.PathLike[str] | None = None,
    profile: str | os.PathLike[str] | None = None,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Recompute what a plan claims.

    Parameters
    ----------
    trace
        The trace it was made from; None checks the structure only.
    profile
        The profile it was made from; None leaves predicted seconds unchecked, unless they come from links alone.

    Raises
    ------
    CertificationError
        A rule is broken or a figure is not what the trace gives.
    MismatchError
        The trace or the profile is not the one the plan names.
    """
    certificate = Certificate()
    check_structure(plan, certificate)
    timed_by = None if profile is None else _profile(plan, profile, certificate)
    if trace is None:
        return certificate
    opened = open_trace(trace)
    claimed = plan.inputs.trace
    if claimed is None or opened.sha256 != claimed.sha256:
        expected = claimed.sha256[:12] if claimed else "no trace"
        raise MismatchError(
            f"{trace}: hash {opened.sha256[:12]}.., the plan was made from {expected}..; give the trace it was made"
            " from (how it fares on another one is a comparison, not a certificate)"
        )
    if opened.num_tokens != claimed.num_tokens or opened.model != plan.model:
        raise CertificationError(f"{trace}: {opened.num_tokens} tokens of {opened.model.name}; the plan says otherwise")
    certificate.checks.append("trace hash")
    if plan.evaluation is not None:
        fitted = check_evaluation(plan, opened, timed_by, certificate, on_progress)
        on_progress("recomputing objective and bound")
        check_outcome(plan, fitted, certificate)
    return certificate


def _profile(plan: Plan, path: str | os.PathLike[str], certificate: Certificate) -> Profile:
    """The plan's profile."""
    found, claimed = load_profile(path), plan.inputs.profile
    sha256 = sha256_file(path)
    if claimed is None or sha256 != claimed.sha256:
        expected = f"{claimed.sha256[:12]}.." if claimed else "no profile"
        raise MismatchError(
            f"{path}: hash {sha256[:12]}.., the plan was made from {expected}; give the profile it was made from"
        )
    certificate.checks.append("profile hash")
    return found


def certifiable_profile(plan: Plan) -> str | None:
    """The path of the plan's own profile where it is on this machine, still with its hash."""
    source = plan.inputs.profile
    if source is None or source.path is None or "://" in source.path:
        return None
    try:
        if size_of(source.path, what="a profile") > MAX_PROFILE_BYTES:
            return None
        return source.path if sha256_file(source.path) == source.sha256 else None
    except (MoeplanError, OSError):
        return None


def certifiable_trace(plan: Plan) -> str | None:
    """The path of the plan's own trace where it is on this machine, still with its hash."""
    source = plan.inputs.trace
    if source is None or "://" in source.path:  # a plan alone must not make anything open a network address
        return None
    try:
        return source.path if open_trace(source.path).sha256 == source.sha256 else None
    except MoeplanError:
        return None
