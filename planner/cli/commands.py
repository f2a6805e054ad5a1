"""The commands there are."""

from typing import Annotated

import typer
from typer.main import get_command

from .lazy import LazyGroup

__all__ = ["COMMANDS", "group"]

COMMANDS = {
    "profile": "Measure this machine, or describe a cluster.",
    "trace": "Record, import, inspect and count routing.",
    "solve": "Compute a plan from a trace.",
    "show": "Print a plan and a picture of it.",
    "compare": "Hold plans against one another on any trace.",
    "certify": "Recompute what a plan claims.",
    "apply": "Make a plan this directory's active plan, or write it for an engine.",
    "validate": "Check a file that places experts by its engine's rules.",
    "demo": "Run the whole chain on the embedded model.",
}


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"moeplan {version('moeplan')}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


_app = typer.Typer(add_completion=False)
_app.callback()(_root)
group = LazyGroup(
    "moeplan",
    COMMANDS,
    params=get_command(_app).params,
    help="Plan Mixture-of-Experts expert parallelism: measure, record, solve, apply.\n\n"
    "In an empty directory, one after another: moeplan profile; moeplan solve --strategy exflow;"
    " moeplan apply plan.json.",
)
