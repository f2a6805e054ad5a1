"""`moeplan solve`: compute a plan from a trace."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Backend, Dispatch, Method, Phase, Strategy
from .screen import Json, console, print_json, progress

if TYPE_CHECKING:
    from ..request import Request

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def solve(
    strategy: Annotated[Strategy, typer.Option(help="What to plan by.")] = Strategy.EXFLOW,
    trace: Annotated[str, typer.Option(help="The trace: a directory, a file or a URI.")] = "traces",
    profile: Annotated[
        Path | None, typer.Option(help="The profile; profile.json where there is one.", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="NxG: N nodes of G devices, instead of the profile's.", show_default=False)
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help="KIND=GBps:us, instead of the profile's; may repeat.", show_default=False),
    ] = None,
    on: Annotated[
        Path | None, typer.Option(help="A plan to add this decision to; its cluster.", show_default=False)
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option("--from", help="exflow: the plan in force, to move few experts from.", show_default=False),
    ] = None,
    horizon: Annotated[
        float | None,
        typer.Option(help="With --from: tokens within which a move must pay for itself.", show_default=False),
    ] = None,
    dispatch: Annotated[
        Dispatch | None, typer.Option(help="Instead of the strategy's own.", show_default=False)
    ] = None,
    method: Annotated[Method | None, typer.Option(help="How to solve; the strategy's own.", show_default=False)] = None,
    backend: Annotated[Backend, typer.Option(help="What solves exflow's ilp and paper.")] = Backend.ORTOOLS,
    slots: Annotated[
        int | None, typer.Option(help="Expert slots a device; surplus ones hold replicas.", show_default=False)
    ] = None,
    redundant: Annotated[int, typer.Option(help="Slots beyond one an expert, in all.")] = 0,
    max_degree: Annotated[int | None, typer.Option(help="pipemoe: chunks at most; 32.", show_default=False)] = None,
    joint: Annotated[bool, typer.Option("--joint", help="pipemoe: one degree for both passes.")] = False,
    full_duplex: Annotated[
        bool, typer.Option("--full-duplex", help="pipemoe: combines have a channel of their own.")
    ] = False,
    phase: Annotated[
        list[Phase] | None, typer.Option(help="Only tokens of this phase; may repeat.", show_default=False)
    ] = None,
    fit_fraction: Annotated[float, typer.Option(help="Share of samples to fit on; the rest judges.")] = 0.5,
    samples_per_step: Annotated[
        int | None, typer.Option(help="Samples of a step; 4 a device.", show_default=False)
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for the solver.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Seed of split, search and intervals.")] = 0,
    learning_curve: Annotated[
        bool, typer.Option("--learning-curve", help="exflow: instead of a plan, its gain by fit tokens; -o PAGE.html.")
    ] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plan goes.")] = Path("plan.json"),
    as_json: Json = False,
) -> None:
    """Compute a plan from a trace, and judge it on samples it has not seen.

    \b
    Examples:
      moeplan solve --strategy exflow --trace traces --cluster 2x8 -o plan.json
      moeplan solve --strategy pipemoe --on plan.json -o pipelined.json
      moeplan solve --from plan.json --trace new-traces -o next.json
    """
    from ..inputs import cluster_for, profile_for
    from ..report import solve_report
    from ..request import Request
    from ..solve import make

    profile_path = profile_for(profile)
    request = Request(
        strategy=strategy.value,
        trace=trace,
        cluster=cluster_for(cluster, profile_path, link or (), on=on or previous),
        profile=profile_path,
        on=on,
        previous=previous,
        horizon_tokens=horizon,
        dispatch_model=None if dispatch is None else dispatch.value,
        method=None if method is None else method.value,
        backend=backend.value,
        slots=slots,
        redundant=redundant,
        phases=tuple(chosen.value for chosen in phase or ()),
        fit_fraction=fit_fraction,
        samples_per_step=samples_per_step,
        time_limit_s=time_limit,
        seed=seed,
        max_degree=max_degree,
        joint=joint,
        full_duplex=full_duplex,
    )
    if learning_curve:
        _show_curve(request, output, as_json=as_json)
        return
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


def _show_curve(request: "Request", output: Path, *, as_json: bool) -> None:
    """The learning curve on stdout, and as a page where one is asked for."""
    from ..learning_curve import learning_curve
    from ..learning_curve_report import as_dict, check_page, curve_report, write_curve

    page = output if output != Path("plan.json") else None
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
