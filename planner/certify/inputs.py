"""A plan's own trace and profile: those with the hashes that it names."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ...errors import CertificationError, MismatchError, MoeplanError
from ...files import sha256_file, size_of
from ...profilers.profile import MAX_PROFILE_BYTES, load
from ...runtime.plan import FileInput, Plan, TraceInput
from ...traces.count_form import CountTrace, open_any
from ...traces.reader import Trace
from .certificate import Certificate


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
    """Refuse a profile that is none, or not the plan's; links that are not its own are told as unchecked."""
    known = load(path).cluster.links
    claimed, sha256 = plan.inputs.profile, sha256_file(path)
    if claimed is None or sha256 != claimed.sha256:
        _refuse_another("profile", path, sha256, claimed)
    certificate.checks.append("profile hash")
    for kind in sorted(plan.cluster.links):
        if plan.cluster.links[kind] != known.get(kind):
            certificate.unchecked.append(f"link {kind}, which is not the profile's")


def _refuse_another(
    what: str, path: object, sha256: str, claimed: FileInput | TraceInput | None, hint: str = ""
) -> NoReturn:
    expected = f"{claimed.sha256[:12]}.." if claimed else f"no {what}"
    raise MismatchError(
        f"{path}: hash {sha256[:12]}.., the plan was made from {expected}; give the {what} it was made from{hint}"
    )


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
