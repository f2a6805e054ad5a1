"""The active plan of a directory: the one that a training or inference script started there carries out."""

import contextlib
import os
import shutil
from pathlib import Path

from pydantic import Field

from ..errors import InputError
from ..files import atomic_path
from .decisions import sidecars_in
from .plan import Plan, load

ACTIVE = Path(".moeplan", "active.json")
VARIABLE = "MOEPLAN_PLAN"


class LoadedPlan(Plan):
    """A plan and the folder of its file, where the files that it names lie."""

    folder: Path = Field(exclude=True)


def activate(plan_path: str | os.PathLike[str], directory: str | os.PathLike[str] = "") -> Path:
    """Make a byte copy of `plan_path` the directory's active plan, with the files it names beside it; where it is.

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
    active = Path(directory, ACTIVE)
    sidecars, folder = sidecars_in(load(plan_path).decisions), Path(plan_path).parent
    contents = {sidecar.file: sidecar.read(folder) for sidecar in sidecars}
    with contextlib.ExitStack() as stack:  # all are written before one appears, and the plan appears last
        shutil.copyfile(plan_path, stack.enter_context(atomic_path(active)))
        for name, content in contents.items():
            stack.enter_context(atomic_path(active.parent / name)).write_bytes(content)
    return active


def load_plan(path: str | os.PathLike[str] | None = None) -> LoadedPlan:
    """The plan at `path`, else that of MOEPLAN_PLAN, else the active plan, found upward from the working directory.

    Raises
    ------
    InputError
        There is none, or it is no valid plan.
    """
    chosen = path or os.environ.get(VARIABLE) or _active_upward(Path.cwd())
    if chosen is None:
        raise InputError(
            f"no plan: none given, {VARIABLE} is not set, and no {ACTIVE} in {Path.cwd()} or above;"
            " run moeplan apply plan.json here"
        )
    return LoadedPlan.model_construct(**dict(load(chosen)), folder=Path(chosen).parent)


def _active_upward(folder: Path) -> Path | None:
    candidates = (above / ACTIVE for above in (folder, *folder.parents))
    return next(filter(Path.is_file, candidates), None)
