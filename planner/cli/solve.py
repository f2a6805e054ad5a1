"""`moeplan solve`: compute a plan from a trace."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .flags import grouped
from .screen import Json, console, print_json, progress
from .solve_flags import Balance, Fit, Pipeline, Replan, Search, Slots, Solver, Where

if TYPE_CHECKING:
    from ..request import Request

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@grouped
def solve(
    where: Where,
    solver: Solver,
    search: Search,
    slots: Slots,
    balance: Balance,
    replan: Replan,
    pipeline: Pipeline,
    fit: Fit,
    learning_curve: Annotated[
        bool, typer.Option("--learning-curve", help="exflow: instead of a plan, its gain by fit tokens; -o PAGE.html.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where the plan goes; plan.json.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a plan from a trace, and judge it on samples it has not seen.

    \b
    Examples:
      moeplan solve --strategy exflow --trace traces --cluster 2x8 -o plan.json
      moeplan solve --strategy pipemoe --on plan.json -o pipelined.json
      moeplan solve --strategy eplb --redundant auto --trace counts --cluster 4x8
      moeplan solve --from plan.json --trace new-traces -o next.json
    """
    from dataclasses import asdict

    from ...files import check_target
    from ..reports.plan import solve_report
    from ..request import Request
    from ..solve import make

    request = Request(
        **where.found(on=replan.previous),
        **solver.chosen(),
        **search.chosen(),
        **slots.chosen(),
        **balance.chosen(),
        **replan.chosen(),
        **asdict(pipeline),
        **fit.chosen(),
    )
    if learning_curve:
        _show_curve(request, output, as_json=as_json)
        return
    path = output or Path("plan.json")
    check_target(path)
    with progress() as say:
        made = make(request, on_progress=say)
    made.save(path)
    plan = made.plan
    interrupted = any(outcome.status == "interrupted" for outcome in plan.outcome.values())
    if as_json:
        print_json({"plan": str(path)} | plan.model_dump(mode="json", exclude={"decisions"}))
    else:
        solve_report(plan, path, console())
    if interrupted:
        print(f"moeplan: interrupted; {path} holds the best found until then", file=sys.stderr)
        raise typer.Exit(130)


def _show_curve(request: "Request", page: Path | None, *, as_json: bool) -> None:
    """The learning curve on stdout, and as a page where one is asked for."""
    from ..learning_curve.curve import learning_curve
    from ..learning_curve.report import as_dict, check_page, curve_report, write_curve

    if page is not None:
        check_page(page)
    with progress() as say:
        curve = learning_curve(request, on_progress=say)
    if page is not None:
        write_curve(curve, page)
    if as_json:
        print_json(as_dict(curve))
    else:
        curve_report(curve, console())
        if page is not None:
            print(f"wrote     {page}")
