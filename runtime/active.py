"""The active plan of a directory: the one that a training or inference script started there carries out."""

import os
import shutil
from pathlib import Path

from ..errors import InputError
from ..files import atomic_path, sha256_file
from .decisions import SidecarFile
from .plan import Plan, load

__all__ = ["activate", "load_plan"]

ACTIVE = Path(".moeplan", "active.json")
VARIABLE = "MOEPLAN_PLAN"


def activate(plan_path: str | os.PathLike[str], directory: str | os.PathLike[str] = "") -> Path:
    """Where the directory's active plan now is: a byte copy of `plan_path`, with the files it names beside it.

    Parameters
    ----------
    directory
        By default the working directory.

    Raises
    ------
    InputError
        The file is no valid plan, or a file that it names is not beside it with its hash; the plan that was active
        stays so.
    StorageError
        The copy cannot be written; the plan that was active stays so.
    """
    plan = load(plan_path)
    active = Path(directory, ACTIVE)
    policy = plan.decisions.sample_policy
    if policy is not None and policy.predictor is not None:
        _copy_sidecar(Path(plan_path).parent, policy.predictor, active.parent)
    with atomic_path(active) as temporary:
        shutil.copyfile(plan_path, temporary)
    return active


def load_plan(path: str | os.PathLike[str] | None = None) -> Plan:
    """The plan at `path`, else what MOEPLAN_PLAN names, else the active plan, found upward from the working directory.

    Raises
    ------
    InputError
        There is none, or it is no valid plan.
    """
    found = path or os.environ.get(VARIABLE) or _active_upward(Path.cwd())
    if found is None:
        raise InputError(
            f"no plan: none given, {VARIABLE} is not set, and no {ACTIVE} in {Path.cwd()} or above;"
            " run moeplan apply plan.json here"
        )
    return load(found)


def _copy_sidecar(source: Path, named: SidecarFile, target: Path) -> None:
    """Copy a file that a plan names, once it is known to be that file."""
    path = source / named.file
    found = sha256_file(path) if path.is_file() else None
    if found != named.sha256:
        what = "is not there" if found is None else f"has hash {found[:12]}.., not {named.sha256[:12]}.."
        raise InputError(f"{path}: {what}; the plan needs it beside it: copy it there, or re-run moeplan solve")
    if source.resolve() != target.resolve():
        with atomic_path(target / named.file) as temporary:
            shutil.copyfile(path, temporary)


def _active_upward(folder: Path) -> Path | None:
    candidates = (above / ACTIVE for above in (folder, *folder.parents))
    return next(filter(Path.is_file, candidates), None)
