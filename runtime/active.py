"""The active plan of a directory: the one that a training or inference script started there carries out."""

import os
import shutil
from pathlib import Path

from ..errors import InputError
from ..files import atomic_path
from .plan import Plan, load

__all__ = ["activate", "load_plan"]

ACTIVE = Path(".moeplan", "active.json")
VARIABLE = "MOEPLAN_PLAN"


def activate(plan_path: str | os.PathLike[str], directory: str | os.PathLike[str] = "") -> Path:
    """Where the directory's active plan now is: a byte copy of `plan_path`.

    Parameters
    ----------
    directory
        By default the working directory.

    Raises
    ------
    InputError
        The file is no valid plan; the plan that was active stays so.
    StorageError
        The copy cannot be written; the plan that was active stays so.
    """
    load(plan_path)
    active = Path(directory, ACTIVE)
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


def _active_upward(folder: Path) -> Path | None:
    candidates = (above / ACTIVE for above in (folder, *folder.parents))
    return next(filter(Path.is_file, candidates), None)
