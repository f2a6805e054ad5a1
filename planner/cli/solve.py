"""`moeplan solve`: compute a plan from a trace."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .flags import grouped
from .screen import Json, console, print_json, progress
from .solve_flags import Fit, Pipeline, Slots, Solver, Where

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@grouped
def solve(
    where: Where,
    solver: Solver,
    slots: Slots,
    pipeline: Pipeline,
    fit: Fit,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plan goes.")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Compute a plan from a trace, and judge it on samples it has not seen.

    \b
    Examples:
      moeplan solve --strategy exflow --trace traces --cluster 2x8 -o plan.json
      moeplan solve --strategy pipemoe --on plan.json -o pipelined.json
    """
    from dataclasses import asdict

    from ..report import solve_report
    from ..request import Request
    from ..solve import make

    request = Request(**where.found(), **solver.chosen(), **asdict(slots), **asdict(pipeline), **fit.chosen())
    with progress() as say:
        made = make(request, on_progress=say)
    made.save(output)
    plan = made.plan
    interrupted = any(outcome.status == "interrupted" for outcome in plan.outcome.values())
    if as_json:
        print_json({"plan": str(output)} | plan.model_dump(mode="json", exclude={"decisions"}))
    else:
        solve_report(plan, output, console())
    if interrupted:
        print(f"moeplan: interrupted; {output} holds the best found until then", file=sys.stderr)
        raise typer.Exit(130)
