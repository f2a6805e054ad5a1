"""`moeplan show`: print a plan."""

from pathlib import Path
from typing import Annotated

import typer

from .screen import Json, console, print_json

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Print a plan: where it came from, what it buys, and a picture of its placement.

    \b
    Example:
      moeplan show plan.json
    """
    from ...runtime.plan import load
    from ..report import show_report

    loaded = load(plan)
    if as_json:
        print_json(loaded.model_dump(mode="json"))
    else:
        show_report(loaded, plan, console())
