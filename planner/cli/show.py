"""`moeplan show`: print a plan."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import Json, Verbose, optional
from .screen import console, print_json


def show(
    plan: Annotated[Path, typer.Argument(help="The plan.")] = Path("plan.json"),
    timeline: Annotated[int | None, optional("Draw how the chunks of this MoE layer overlap, from 0.")] = None,
    output: Annotated[
        Path | None,
        optional(
            "The timeline, else how redundant experts were weighed, as a page (.html); .json: a Chrome trace.",
            "-o",
            "--output",
        ),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print a plan: where it came from, what it buys, and a picture of its placement; or a layer's timeline.

    \b
    Examples:
      moeplan show plan.json
      moeplan show plan.json --timeline 3 -o layer3.html
    """
    from ...runtime.plan import load
    from ..report.plan import show_report
    from ..strategies.eplb.sections import write_redundancy
    from ..strategies.pipemoe.timeline import BASIS, timeline_picture, timelines, trace_events, write_timeline

    loaded = load(plan)
    if output is not None and timeline is None:
        write_redundancy(loaded, output)
    elif timeline is not None and output is not None:
        write_timeline(loaded, timeline, output)
    if as_json and timeline is not None:
        events = trace_events(timelines(loaded, timeline), timeline)
        about = {"plan": str(plan), "layer": timeline, "seconds": BASIS, "output": output and str(output)}
        print_json({**about, "traceEvents": events})
    elif as_json:
        print_json(loaded.model_dump(mode="json"))
    elif output is not None:
        print(f"wrote     {output}")
    elif timeline is None:
        show_report(loaded, plan, console(), verbose=verbose)
    else:
        screen = console()
        for line in timeline_picture(loaded, timeline, screen.width):
            screen.print(line)
