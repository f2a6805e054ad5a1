"""Certification: everything a plan claims, recomputed from its trace.

The file was not edited, and is of this trace and this profile. Its decisions are replayed token by token by `naive`,
which takes nothing of the solvers but placements; samples that move are counted so once per placement. The same prices
and metrics then give the same figures; bounds are proved again (`bounds`); every strategy rechecks its own objective
from its definition. Baselines come from their solvers: a baseline *is* that algorithm's output. What is not recomputed
is listed in the certificate.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import CertificationError, InputError
from ...runtime.decisions import SidecarFile, sidecars_in
from ...runtime.plan import Plan
from ...traces.count_form import CountTrace
from ..evaluate.evaluate import Evaluated
from ..strategies.registry import chosen_by
from ..strategies.strategy import Recheck, Strategy
from .certificate import Certificate, certifiable_profile, certifiable_trace, check_profile, check_trace
from .judged import check_judged
from .recounted import Recounted, mixture_of, task_of
from .structure import check_structure, strategies_of

__all__ = ["Certificate", "Recount", "certifiable_profile", "certifiable_trace", "certify", "recount"]


def certify(
    plan: Plan,
    trace: str | os.PathLike[str] | None = None,
    profile: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Recompute a plan's claims; as `recount`."""
    return recount(plan, trace, profile, folder=folder, on_progress=on_progress).certificate


@dataclass(frozen=True, slots=True)
class Recount:
    """The certificate of a plan, and what it rests on: nothing where no figure was recomputed."""

    certificate: Certificate
    task: Recounted | None = None
    evaluated: Evaluated | None = None


def recount(
    plan: Plan,
    trace: str | os.PathLike[str] | None = None,
    profile: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    keep: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Recount:
    """Recompute a plan's claims, token by token.

    Parameters
    ----------
    trace
        The trace it was made from; None checks the structure only.
    profile
        The profile it was made from; None leaves predicted seconds unchecked, unless they come from links alone.
    folder
        Where the plan's sidecars are; None is the working directory; without a folder and a trace they are not read.
    keep
        Keep the tallies of the part that judges.

    Raises
    ------
    CertificationError
        A rule is broken, a figure is not what the trace gives, or a file beside the plan is another one.
    InputError
        A file that the decisions name is not beside the plan.
    MismatchError
        The trace or the profile is not the one the plan names.
    """
    held_against = [None if path is None else os.fspath(path) for path in (trace, profile)]
    certificate, place = Certificate(trace=held_against[0], profile=held_against[1]), Path(folder or ".")
    check_structure(plan, certificate)
    named = () if folder is None and trace is None else sidecars_in(plan.decisions)
    sidecars = {file.file: _contents(file, place) for file in named}
    strategies = strategies_of(plan)
    for chosen in (*strategies, *chosen_by(plan)):
        _recheck_alone(chosen, plan, certificate)
    certificate.unchecked.clear()  # those were of figures, none of which is checked without a trace
    if profile is not None:
        check_profile(plan, profile, certificate)
    if trace is None:
        return Recount(certificate)
    opened = check_trace(plan, trace, certificate)
    if plan.evaluation is None:
        certificate.unchecked.append((strategies or [Strategy()])[-1].unjudged)
        return Recount(certificate)
    last, mixture = strategies[-1], mixture_of(plan, str(opened.path), opened.sha256)
    if mixture is None:
        certificate.unchecked.append("figures of a mixture, whose other traces are not here; put them where they were")
        return Recount(certificate)
    if isinstance(opened, CountTrace) and not (last.moves_samples or last.by_loads):
        raise CertificationError(f"{trace}: a trace in count form; a {last.name} plan is made from tokens")
    timed_by = None if profile is None else Path(profile)
    task = task_of(plan, last, str(opened.path), timed_by, mixture)
    evaluated = check_judged(plan, task, certificate, sidecars, on_progress, keep=keep)
    certificate.replayed = True
    certificate.unchecked += ["solver seconds, status, method and backend", "that options are what was asked for"]
    certificate.unchecked += filter(None, (one.unchecked for one in chosen_by(plan)))
    for chosen in strategies:
        on_progress(f"rechecking {chosen.name}")
        own = task if chosen is last else task_of(plan, chosen, str(opened.path), timed_by)
        again = Recheck(own, evaluated if chosen is last else None, place)
        if chosen.decides not in plan.outcome:
            certificate.unchecked.append(f"objective of {chosen.decides}, decided for other samples, steps or seconds")
        chosen.recheck(plan, again, certificate)
    if plan.inputs.profile is not None and profile is None:
        certificate.unchecked.append("the profile's hash")
    return Recount(certificate, task, evaluated)


def _contents(file: SidecarFile, folder: Path) -> bytes:
    """Contents of a file that the decisions name. Another one that stands in its place breaks the plan's claim."""
    try:
        return file.read(folder)
    except InputError as error:
        if (folder / file.file).exists():
            raise CertificationError(str(error)) from error
        raise


def _recheck_alone(chosen: Strategy, plan: Plan, certificate: Certificate) -> None:
    """Recheck the claims that need no trace; input that cannot be read is the fault of the plan."""
    try:
        chosen.recheck(plan, None, certificate)
    except InputError as error:
        raise CertificationError(str(error)) from error
