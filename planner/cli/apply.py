"""`moeplan apply`: certify a plan and make it the directory's active plan."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ...errors import UsageError
from .screen import Json, console, print_json, progress

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def apply(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: a command to start under the plan.", show_default=False)
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="The trace to certify against; the plan's own.", show_default=False)
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="The profile to certify seconds by; the plan's own.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Certify a plan and make it this directory's active plan, which moeplan.runtime.load_plan() finds.

    Certifies against the plan's own trace and profile where they are still there with their hashes; without the
    trace the structure only, without the profile no seconds.

    \b
    Examples:
      moeplan apply plan.json
      moeplan apply plan.json -- torchrun --nproc-per-node 4 generate.py
    """
    from ...runtime.active import activate
    from ...runtime.plan import load
    from ..certify import certifiable_profile, certifiable_trace, certify

    loaded = load(plan)
    if command and shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: no such command; nothing was applied")
    against = trace or certifiable_trace(loaded)
    with progress() as say:
        certificate = certify(
            loaded, against, profile or certifiable_profile(loaded), folder=plan.parent, on_progress=say
        )
    active = activate(plan)
    if as_json:
        print_json({"plan": str(plan), "active": str(active), "certified_against": against})
    else:
        console().print(certificate.summary(plan, against))
        print(f"active    {active}    moeplan.runtime.load_plan() finds it from here downward")
    if command:
        os.environ["MOEPLAN_PLAN"] = str(active.resolve())
        os.execvp(command[0], command)  # noqa: S606
