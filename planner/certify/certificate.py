"""The outcome of a certification, and the plan's own trace and profile: those with the hashes that it names."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ...errors import CertificationError, MismatchError, MoeplanError
from ...files import sha256_file, size_of
from ...profilers.profile import MAX_PROFILE_BYTES, load
from ...runtime.plan import FileInput, Plan, TraceInput
from ...traces.count_form import CountTrace, open_any
from ...traces.reader import Trace
from ..strategies.eplb.options import Member

TOLERANCE = 1e-9  # relative


@dataclass(slots=True)
class Certificate:
    """Certificate of a plan: checks made, checks left out, figures recomputed, and the largest relative difference.

    `replayed` says whether the plan's trace was replayed: else the figures are those that follow from the plan alone.
    """

    trace: str | None = None
    profile: str | None = None
    checks: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    figures: int = 0
    largest_difference: float = 0.0
    replayed: bool = False

    def summary(self, plan: object) -> str:
        """One line that says whether a plan is certified."""
        if self.trace is None:
            checks = ", ".join(self.checks)
            return f"NOT certified {plan}: structure only ({checks}); no trace to hold its figures against"
        word = "certified" if self.replayed else "NOT certified"
        return (
            f"{word} {plan} against {self.trace}: {self.figures} figures recomputed, largest relative difference"
            f" {self.largest_difference:.1g}"
        )

    def details(self) -> list[str]:
        """The checks made and those left out, a line each."""
        if self.trace is None:
            return []
        rows = {"checked": self.checks, "unchecked": self.unchecked}
        return [f"{name:<9} {', '.join(what)}" for name, what in rows.items() if what]

    def lacking(self, plan: Plan) -> str:
        """Reason why no figure of a plan was recomputed, and the flag that helps."""
        if self.trace is not None:
            return self.unchecked[-1]
        if plan.inputs.trace is None:
            return "it names no trace that its figures are from; re-run moeplan solve"
        return gone("trace", plan.inputs.trace)

    def checked(self, what: str) -> None:
        """Record a check, once."""
        if what not in self.checks:
            self.checks.append(what)

    def agree(self, what: str, claimed: object, recounted: object) -> None:
        """Record a figure; refuse a number that differs by more than rounding, and any other value that differs."""
        if not (isinstance(claimed, int | float) and isinstance(recounted, int | float)):
            if claimed != recounted:
                raise CertificationError(f"{what}: the plan says {claimed!s:.200}, the recount {recounted!s:.200}")
            return
        difference = abs(claimed - recounted) / max(abs(claimed), abs(recounted), 1e-300)
        if not difference <= TOLERANCE:  # NaN agrees with nothing
            raise CertificationError(
                f"{what}: the plan says {claimed:.12g}, the recount {recounted:.12g}; the plan was not made from this"
                " trace by this version, or was edited. Re-run moeplan solve"
            )
        self.figures += 1
        self.largest_difference = max(self.largest_difference, difference)


def gone(what: str, source: FileInput | TraceInput) -> str:
    """Words for a file that is not where a plan names it, or is another one by now."""
    place = f"its {what}" if source.path is None else f"its {what} {source.path}"
    return f"{place} (hash {source.sha256[:12]}..) is not here as it was; give it with --{what}"


def check_trace(plan: Plan, path: str | os.PathLike[str], certificate: Certificate) -> Trace | CountTrace:
    """The plan's trace, refused where it is another one."""
    opened, claimed = open_any(path), plan.inputs.trace
    if claimed is None or opened.sha256 != claimed.sha256:
        _refuse_another("trace", path, opened.sha256, claimed, " (how it fares on another one: moeplan compare)")
    counted = isinstance(opened, Trace) and opened.num_tokens != claimed.num_tokens
    if counted or opened.meta.model != plan.model:
        raise CertificationError(f"{path}: {opened.num_rows} rows of {opened.meta.model.name}; the plan says otherwise")
    certificate.checks.append("trace hash")
    return opened


def check_profile(plan: Plan, path: str | os.PathLike[str], certificate: Certificate) -> None:
    """Refuse a profile that is none, or not the plan's; list links that are not its own as unchecked."""
    measured = load(path).cluster
    claimed, sha256 = plan.inputs.profile, sha256_file(path)
    if claimed is None or sha256 != claimed.sha256:
        _refuse_another("profile", path, sha256, claimed)
    certificate.checks.append("profile hash")
    given = plan.cluster.given_beside(measured)
    certificate.unchecked += [f"link {kind}, which is not the profile's" for kind in given]


def _refuse_another(
    what: str, path: object, sha256: str, claimed: FileInput | TraceInput | None, hint: str = ""
) -> NoReturn:
    expected = f"{claimed.sha256[:12]}.." if claimed else f"no {what}"
    raise MismatchError(
        f"{path}: hash {sha256[:12]}.., the plan was made from {expected}; give the {what} it was made from{hint}"
    )


def certifiable_trace(plan: Plan, folder: str | os.PathLike[str] = "") -> str | None:
    """The path of the plan's own trace where it is on this machine, still with its hash.

    One that leads nowhere from the working directory is tried from the plan's `folder`.
    """
    return path_of(plan.inputs.trace, folder, trace_hash)


def certifiable_profile(plan: Plan, folder: str | os.PathLike[str] = "") -> str | None:
    """The path of the plan's own profile; parameters as of `certifiable_trace`."""

    def hash_of(path: str) -> str | None:
        return None if size_of(path, what="a profile") > MAX_PROFILE_BYTES else sha256_file(path)

    return path_of(plan.inputs.profile, folder, hash_of)


def trace_hash(path: str) -> str | None:
    """The hash of a trace."""
    return open_any(path).sha256


def path_of(
    source: FileInput | TraceInput | Member | None, folder: str | os.PathLike[str], hash_of: Callable[[str], str | None]
) -> str | None:
    """The first of the places of a file that has its hash."""
    if source is None or source.path is None or "://" in source.path:  # a plan alone must not open a network address
        return None
    for place in (source.path, str(Path(folder, source.path))):
        with contextlib.suppress(MoeplanError, OSError):
            if hash_of(place) == source.sha256:
                return place
    return None
