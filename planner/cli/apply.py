"""`moeplan apply`: certify a plan and make it the directory's active plan."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import UsageError
from .screen import Json, console, print_json, progress

if TYPE_CHECKING:
    from ...runtime.plan import Plan

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
PLAN = Path("plan.json")


@app.command()
def apply(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = PLAN,
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: a command to start under the plan.", show_default=False)
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="The trace to certify against; the plan's own.", show_default=False)
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="The profile to certify seconds by; the plan's own.", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Write this engine's files: sglang, vllm, vllm-ascend, tensorrt-llm, tutel.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where those go: a new directory.", show_default=False)
    ] = None,
    hf_config: Annotated[
        Path | None,
        typer.Option(help="The model's config.json, for layers that the plan does not know.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Write this Hugging Face checkpoint with its experts in the plan's order.", show_default=False
        ),
    ] = None,
    undo: Annotated[
        Path | None, typer.Option(help="Write this permuted checkpoint in its first order.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Certify a plan and make it this directory's active plan, which moeplan.runtime.load_plan() finds.

    Certifies against the plan's own trace and profile where they are still there with their hashes; without the
    trace the structure only, without the profile no seconds.

    With --engine it writes the files that carry the plan into a serving engine instead, prints the command that starts
    the engine with them, and leaves the active plan as it is: engines do not read that.

    With --checkpoint it writes the model itself with the experts of each layer in the plan's order, for engines and
    trainers that take no placement; --undo gives the first order back and needs no plan. Neither certifies (moeplan
    certify does) nor activates, and an interrupted one goes on when it is run again.

    \b
    Examples:
      moeplan apply plan.json
      moeplan apply plan.json -- torchrun --nproc-per-node 4 generate.py
      moeplan apply plan.json --engine sglang -o placement --hf-config config.json
      moeplan apply plan.json --checkpoint Mixtral-8x7B -o Mixtral-8x7B-planned
      moeplan apply --undo Mixtral-8x7B-planned -o Mixtral-8x7B
    """
    ways = [way for way in (engine, checkpoint, undo) if way is not None]
    if len(ways) > 1 or bool(ways) != (output is not None) or (ways and command):
        raise UsageError(
            "-o DIRECTORY goes with one of --engine NAME, --checkpoint DIRECTORY and --undo DIRECTORY, without a"
            " command after --"
        )
    if undo is not None and plan != PLAN:
        raise UsageError(f"{plan}: --undo needs neither a plan nor a command after --")
    if hf_config is not None and engine is None:
        raise UsageError("--hf-config goes with --engine NAME")
    if output is not None and engine is None:
        if trace or profile:
            raise UsageError("--trace and --profile do not go with --checkpoint and --undo")
        _carry(plan, checkpoint, undo, output, as_json)
        return
    from ...runtime.plan import load

    loaded = load(plan)
    if command and shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: no such command; nothing was applied")
    against, summary = _certified(loaded, plan, trace, profile)
    if engine is not None and output is not None:
        from .apply_engine import exported

        told, lines = exported(loaded, engine, output, hf_config)
    else:
        told, lines = _activated(loaded, plan)
    _print_done({"plan": str(plan), "certified_against": against} | told, [summary, *lines], as_json)
    if command:
        sys.stdout.flush()
        os.environ["MOEPLAN_PLAN"] = str(Path(told["active"]).resolve())
        os.execvp(command[0], command)  # noqa: S606


def _certified(loaded: "Plan", plan: Path, trace: str | None, profile: str | None) -> tuple[str | None, str]:
    """The trace that a plan was certified against, its own where none is given, and what was found in words."""
    from ..certify import certifiable_profile, certifiable_trace, certify

    against = trace or certifiable_trace(loaded, plan.parent)
    timed = profile or certifiable_profile(loaded, plan.parent)
    with progress() as say:
        certificate = certify(loaded, against, timed, folder=plan.parent, on_progress=say)
    return against, certificate.summary(plan, against)


def _activated(loaded: "Plan", plan: Path) -> tuple[dict[str, Any], list[str]]:
    """Where a plan is active, as JSON and as lines."""
    from ...runtime.active import activate
    from ..report.answer import answer

    lines = [answer(loaded)] if loaded.verdict is not None else []
    active = activate(plan)
    return {"active": str(active)}, [
        *lines,
        f"active    {active}    moeplan.runtime.load_plan() finds it from here downward",
    ]


def _print_done(told: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """Print the result as JSON or as lines. The command that starts an engine has a line to itself, to paste."""
    if as_json:
        print_json(told)
        return
    screen = console()
    for line in lines:
        screen.print(line)
    if "command" in told:
        print("start", told["command"], sep="\n")


def _carry(plan: Path, checkpoint: Path | None, undo: Path | None, output: Path, as_json: bool) -> None:
    from .apply_checkpoint import permute_checkpoint, undo_checkpoint

    if checkpoint is not None:
        permute_checkpoint(plan, checkpoint, output, as_json=as_json)
    elif undo is not None:
        undo_checkpoint(undo, output, as_json=as_json)
