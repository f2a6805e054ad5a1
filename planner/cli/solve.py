"""`moeplan solve`: compute a plan from a trace."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..request import Dispatch, Wire
from ..strategies.registry import STRATEGIES
from .flags import (
    Concurrency,
    Json,
    Phases,
    Purpose,
    SamplesPerStep,
    StrategyFlags,
    TokensPerStep,
    Verbose,
    Waterfill,
    WorkersText,
    optional,
    phases,
    with_strategy_flags,
)
from .screen import console, end_interrupted, print_json, progress

if TYPE_CHECKING:
    from ..request import Request

BY = "What to plan by; auto tries all and combines them."
LINK = "Instead of the profile's; DEVICES of a node share it; may repeat."
WIRE = "Send hidden vectors as 8-bit rows; results change."
TRACES = "A directory (default: traces), a file or a URI; eplb: several with weights."


@with_strategy_flags
def solve(
    flags: StrategyFlags,
    strategy: Annotated[Literal[tuple(STRATEGIES)], typer.Option(help=BY)] = "auto",  # type: ignore[valid-type]
    trace: Annotated[list[str] | None, optional(TRACES, metavar="TRACE[:WEIGHT]")] = None,
    profile: Annotated[Path | None, optional("The profile; else profile.json, if there.")] = None,
    cluster: Annotated[str | None, optional("N nodes of G devices; else the profile's.", metavar="NxG")] = None,
    link: Annotated[list[str] | None, optional(LINK, metavar="KIND=GBps:us[:DEVICES]")] = None,
    on: Annotated[Path | None, optional("Add this decision to a plan, on its cluster.")] = None,
    previous: Annotated[Path | None, optional("exflow: the plan in force; few experts move.", "--from")] = None,
    dispatch: Annotated[Dispatch | None, optional("Dispatch model; else the strategy's own.")] = None,
    wire: Annotated[Wire | None, optional(WIRE)] = None,
    waterfill: Waterfill = False,
    phase: Phases = None,
    fit_fraction: Annotated[
        float | None, optional("Share of samples to fit on; the rest judges. 0.5, or 1 if there is one.")
    ] = None,
    purpose: Purpose = None,
    tokens_per_step: TokensPerStep = None,
    concurrency: Concurrency = None,
    samples_per_step: SamplesPerStep = None,
    seed: Annotated[int, typer.Option(help="Seed of split, search and intervals.")] = 0,
    workers: WorkersText = "auto",
    learning_curve: Annotated[
        bool, typer.Option("--learning-curve", help="exflow: instead of a plan, its gain by fit tokens; -o PAGE.html.")
    ] = False,
    output: Annotated[Path | None, optional("Where the plan goes; plan.json.", "-o", "--output")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compute a plan from a trace, and judge it on samples it has not seen.

    Takes 15 to 25 s for 44,000 tokens of 24 layers on 2 cores, in proportion more for more; the first time up to a
    minute more, to compile. --time-limit bounds the search.

    \b
    Examples:
      moeplan solve
      moeplan solve --engine sglang --trace traces --profile h200.json
      moeplan solve --concurrency 2048 --trace traces --profile h200.json
      moeplan solve --strategy eplb --redundant auto --trace counts --cluster 4x8
      moeplan solve --for training --tokens-per-step 65536 --trace traces
      moeplan solve --strategy pipemoe --on plan.json -o pipelined.json
      moeplan solve --strategy exflow --from plan.json --trace new -o next.json
    """
    from ..request import Request, cluster_for, profile_for

    source, mixture = _sources(trace)  # a mistyped trace is refused before a missing profile
    known = profile_for(profile)
    request = Request.of(
        strategy=strategy,
        trace=source,
        mixture=mixture,
        profile=known,
        cluster=cluster_for(cluster, known, link or (), on=on or previous),
        on=on,
        previous=previous,
        dispatch_model=dispatch,
        wire=wire,
        waterfill=waterfill,
        phases=phases(phase),
        fit_fraction=fit_fraction,
        purpose=purpose,
        tokens_per_step=tokens_per_step,
        concurrency=concurrency,
        samples_per_step=samples_per_step,
        seed=seed,
        **flags,
    )
    if learning_curve:
        _show_curve(request, output, workers, as_json=as_json)
    else:
        _write_plan(request, output or Path("plan.json"), workers, verbose=verbose, as_json=as_json)


def _write_plan(request: "Request", path: Path, workers: str, *, verbose: bool, as_json: bool) -> None:
    from ...files import check_target
    from ...workers import opened
    from ..report.plan import solve_report
    from ..solve import make

    check_target(path)
    replaced = path.exists()
    with progress() as say, opened(workers) as there:
        solved = make(request, on_progress=say, workers=there)
    solved.save(path)
    if as_json:
        print_json({"plan": str(path)} | solved.plan.model_dump(mode="json", exclude={"decisions"}))
    else:
        solve_report(solved.plan, path, console(), replaced=replaced, verbose=verbose)
    if solved.interrupted:
        end_interrupted(f"{path} holds the best found until then")


def _show_curve(request: "Request", page: Path | None, workers: str, *, as_json: bool) -> None:
    from ...workers import opened
    from ..document import check_page
    from ..learning_curve import as_dict, curve_report, learning_curve, write_curve

    if page is not None:
        check_page(page, " with --learning-curve; it writes no plan, expected a page")
    with progress() as say, opened(workers) as there:
        curve = learning_curve(request, on_progress=say, workers=there)
    if page is not None:
        write_curve(curve, page)
    if as_json:
        print_json(as_dict(curve))
    else:
        curve_report(curve, console())
        if page is not None:
            print(f"wrote     {page}")


def _sources(texts: list[str] | None) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The first trace, and the traces of a mixture with their weights; a trace alone without a weight is no mixture."""
    from ...traces.dataset import form_of

    if not texts:
        return "traces", ()
    sources = [_weighted(text) for text in texts]
    for path, _ in sources:
        form_of(path)
    if [weight for _, weight in sources] == [None]:
        return sources[0][0], ()
    return sources[0][0], tuple((path, 1.0 if weight is None else weight) for path, weight in sources)


def _weighted(text: str) -> tuple[str, float | None]:
    """A trace and its weight of `TRACE`, which may be a name with colons that is there, or `TRACE:WEIGHT`."""
    path, colon, weight = text.rpartition(":")
    try:
        return (path, float(weight)) if colon and path and not os.path.exists(text) else (text, None)
    except ValueError:
        return text, None
