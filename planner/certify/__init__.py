"""Certification: everything a plan claims, recomputed by other code than made it.

The placement rules are read off the plan's own lists, the trace is recounted, and shares, intervals, gain, verdict,
objective and bound are computed again. Only the baselines' placements come from their solvers: a baseline *is* that
algorithm's output. What is not recomputed is listed in the certificate.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ...errors import CertificationError, MismatchError, MoeplanError
from ...files import sha256_file, size_of
from ...profilers.profile import MAX_PROFILE_BYTES, Profile
from ...profilers.profile import load as load_profile
from ...runtime.plan import Plan
from ...traces.count_form import CountTrace, open_any
from ...traces.reader import Trace
from .certificate import Certificate
from .evaluation import check_evaluation
from .evidence import check_evidence
from .fitted import Fitted
from .mixture import check_mixture
from .outcome import check_outcome
from .pipeline import check_pipeline
from .policy_structure import check_sample_policy_structure
from .sample_policy import check_sample_policy
from .structure import check_structure, placement_options
from .wishes import check_raw, check_wishes

__all__ = ["Certificate", "certifiable_profile", "certifiable_trace", "certify"]


def certify(
    plan: Plan,
    trace: str | os.PathLike[str] | None = None,
    profile: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Recompute what a plan claims.

    Parameters
    ----------
    trace
        The trace it was made from; None checks the structure only.
    profile
        The profile it was made from; None leaves predicted seconds unchecked, unless they come from links alone.
    folder
        Where the plan's sidecars are; None is the working directory.

    Raises
    ------
    CertificationError
        A rule is broken or a figure is not what the trace gives.
    MismatchError
        The trace or the profile is not the one the plan names.
    """
    certificate = Certificate()
    check_structure(plan, certificate)
    check_evidence(plan)
    check_wishes(plan, certificate)
    if plan.decisions.sample_policy is not None:
        check_sample_policy_structure(plan, certificate)
    timed_by = None if profile is None else _profile(plan, profile, certificate)
    if trace is None:
        return certificate
    opened = _trace(plan, trace, certificate)
    if plan.evaluation is None:
        return certificate
    if plan.decisions.sample_policy is not None:
        beside = None if folder is None else Path(folder)
        check_sample_policy(plan, opened, timed_by, certificate, on_progress, folder=beside)
        if plan.decisions.pipeline is not None:
            certificate.unchecked.append("degrees, judged in the plan they came from")
        return certificate
    fitted: Fitted | None
    if plan.strategies[-1] == "eplb" and placement_options(plan).mixture:
        fitted = check_mixture(plan, opened, timed_by, certificate, on_progress)
    elif isinstance(opened, CountTrace) and (plan.strategies[-1] != "eplb" or plan.decisions.pipeline is not None):
        raise CertificationError(f"{trace}: a trace in count form; a {plan.strategies[-1]} plan is made from tokens")
    elif plan.decisions.pipeline is None or isinstance(opened, CountTrace):
        fitted = check_evaluation(plan, opened, timed_by, certificate, on_progress)
    else:
        fitted = check_pipeline(plan, opened, timed_by, certificate, on_progress)
    if "placement" in plan.outcome and fitted is not None:
        on_progress("recomputing objective and bound")
        check_outcome(plan, fitted, certificate, Path(folder or "."))
        check_raw(plan, fitted, certificate)
    return certificate


def _trace(plan: Plan, path: str | os.PathLike[str], certificate: Certificate) -> Trace | CountTrace:
    """The plan's trace."""
    opened, claimed = open_any(path), plan.inputs.trace
    if claimed is None or opened.sha256 != claimed.sha256:
        expected = claimed.sha256[:12] if claimed else "no trace"
        raise MismatchError(
            f"{path}: hash {opened.sha256[:12]}.., the plan was made from {expected}..; give the trace it was made"
            " from (how it fares on another one: moeplan compare)"
        )
    counted = isinstance(opened, Trace) and opened.num_tokens != claimed.num_tokens
    if counted or opened.meta.model != plan.model:
        raise CertificationError(f"{path}: {opened.num_rows} rows of {opened.meta.model.name}; the plan says otherwise")
    certificate.checks.append("trace hash")
    return opened


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


def certifiable_profile(plan: Plan, folder: str | os.PathLike[str] = "") -> str | None:
    """The path of the plan's own profile where it is on this machine, still with its hash; parameters as below."""
    source = plan.inputs.profile
    return None if source is None or source.path is None else _found(source.path, folder, source.sha256, _profile_hash)


def certifiable_trace(plan: Plan, folder: str | os.PathLike[str] = "") -> str | None:
    """The path of the plan's own trace where it is on this machine, still with its hash.

    Parameters
    ----------
    folder
        Where the plan lies: a path that leads nowhere from the working directory is tried from there.
    """
    source = plan.inputs.trace
    return None if source is None else _found(source.path, folder, source.sha256, lambda path: open_any(path).sha256)


def _found(path: str, folder: str | os.PathLike[str], sha256: str, hash_of: Callable[[str], str | None]) -> str | None:
    """The first of the places of a path that has this hash."""
    if "://" in path:  # a plan alone must not make anything open a network address
        return None
    for place in (path, str(Path(folder, path))):
        with contextlib.suppress(MoeplanError, OSError):
            if hash_of(place) == sha256:
                return place
    return None


def _profile_hash(path: str) -> str | None:
    return None if size_of(path, what="a profile") > MAX_PROFILE_BYTES else sha256_file(path)
